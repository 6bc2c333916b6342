"""The dashboard in a real browser, beside a real server under load."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.browser.conftest import KEY, PHONE, VIEW, load, visit
from tests.server.process import wait_until

HEADERS = {"authorization": f"Bearer {KEY}"}
IS_MOVING = "name => document.querySelector(`#chart-${name} b`).textContent !== '–'"


def gauge(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def metrics(server: str) -> str:
    return httpx.get(f"{server}/metrics", headers=HEADERS).text


def held(server: str) -> float:
    """Blocks, as /metrics says it."""
    text = metrics(server)
    return gauge(text, "quire:kv_blocks") - gauge(text, "quire:kv_blocks_free")


def blocks(page: Any) -> dict[str, float]:
    """As the map shows them."""
    shown = page.evaluate("({...document.getElementById('blocks').dataset})")
    return {name: float(value) for name, value in shown.items()}


def test_who_has_no_key_sees_nothing(chromium: Any, server: str) -> None:
    with visit(chromium, server) as visited:
        page = visited.page
        page.goto(f"{server}/dashboard")
        page.wait_for_selector("#login", state="visible")
        assert page.is_hidden("#overview")
        visited.check_axe()
        page.fill("#key", "wrong")
        page.click("#login-form button")
        visited.wait("() => document.getElementById('login-error').textContent.includes('does not know')")
        page.fill("#key", KEY)
        page.click("#login-form button")
        visited.wait("() => document.getElementById('model').textContent === 'quire-demo'")
        page.reload()  # the tab keeps the key …
        visited.wait("() => document.getElementById('status').textContent === 'Live'")
        page.click("#leave")  # … until it is told not to
        page.wait_for_selector("#login", state="visible")
        assert page.evaluate("sessionStorage.length") == 0


def test_the_dashboard_shows_a_server_under_load(chromium: Any, server: str) -> None:
    with visit(chromium, server) as visited, load(server, 6, ignore_eos=True):
        page = visited.page
        visited.log_in()
        for chart in ("throughput", "queue", "kv", "drafts"):
            visited.wait(IS_MOVING, chart)
        before = page.inner_text("#chart-throughput b"), page.get_attribute("#steps", "data-last")
        visited.wait(
            "before => document.querySelector('#chart-throughput b').textContent !== before[0]"
            " && document.getElementById('steps').dataset.last !== before[1]",
            before,
        )

        # The map is of some moment of the last seconds: what it shows lies between what /metrics said in these.
        seen: list[float] = []
        for _ in range(60):
            seen.append(held(server))
            shown = blocks(page)
            assert shown["blocks"] == gauge(metrics(server), "quire:kv_blocks")
            page.wait_for_timeout(50)
        assert min(seen) <= shown["held"] <= max(seen)
        assert max(seen) > 0
        visited.wait("() => Number(document.getElementById('blocks').dataset.shared) > 0")
        page.focus("#blocks")
        page.keyboard.press("ArrowRight")
        visited.wait("() => document.getElementById('blocks-cell').textContent.startsWith('Block 1:')")
        visited.wait("() => document.getElementById('chart-first-token').querySelector('b').textContent !== '–'")
        visited.check_axe()
        visited.shoot("dashboard", whole=True)
    with visit(chromium, server) as visited:  # at rest both say the same
        assert wait_until(lambda: held(server) == 0)
        visited.log_in()
        visited.wait("() => document.getElementById('blocks').dataset.held === '0'")
        assert blocks(visited.page)["cached"] > 0


@pytest.mark.parametrize("viewport", [VIEW, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_paint_and_what_readers_find(
    chromium: Any, server: str, scheme: str, viewport: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing serious in any view, in any light, at any width. The time to the first paint is printed, and no test."""
    with visit(chromium, server, color_scheme=scheme, viewport=viewport) as visited, load(server, 2, ignore_eos=True):
        page = visited.page
        page.goto(f"{server}/dashboard")
        page.wait_for_selector("#login", state="visible")
        visited.wait("() => performance.getEntriesByType('paint').length === 2")
        paints = page.evaluate("performance.getEntriesByType('paint').map((one) => [one.name, one.startTime])")
        visited.check_axe()
        visited.log_in()
        visited.wait(IS_MOVING, "throughput")
        for tab in ("overview", "requests", "playground"):
            page.click(f"#tab-{tab}")
            page.wait_for_timeout(300)
            visited.check_axe()
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], tab
        page.click("#tab-requests")
        page.click("#requests-table tbody button >> nth=0")
        page.wait_for_selector("#life-events li >> nth=0")
        visited.check_axe()
    with capsys.disabled():
        print(f"\n{scheme}, {viewport['width']} px: " + ", ".join(f"{name} {at:.0f} ms" for name, at in paints))


def test_two_cores_side_by_side(chromium: Any, cores: str) -> None:
    """Of a server with two front ends as well: whichever is asked shows all."""
    with visit(chromium, cores) as visited, load(cores, 6, ignore_eos=True):
        page = visited.page
        page.goto(f"{cores}/dashboard")
        page.wait_for_selector("#cores tbody tr >> nth=1")
        visited.wait(
            "() => [...document.querySelectorAll('#cores tbody tr')]"
            ".every((row) => Number(row.children[2].textContent) > 0)"
        )
        for core in ("1", "0"):
            before = page.get_attribute("#steps", "data-last")
            page.select_option("#core", core)
            visited.wait("before => document.getElementById('steps').dataset.last !== before", before)
            visited.wait("() => Number(document.getElementById('blocks').dataset.held) > 0")
        visited.check_axe()
        page.click("#tab-requests")
        visited.wait(
            "() => ['0', '1'].every((core) => [...document.querySelectorAll('#requests-table tbody tr:not(.gap)')]"
            ".some((row) => row.children[3].textContent === core))"
        )
        assert "no answer" not in page.inner_text("#requests-text")
        page.click("#requests-table tbody button >> nth=0")
        visited.wait("() => document.getElementById('life-body').textContent.includes('Answer 1')")
        assert "/v1/chat/completions" in page.inner_text("#life .tiles")


@pytest.mark.long
def test_a_request_opens(chromium: Any, server: str) -> None:
    with visit(chromium, server) as visited, load(server, 3, logprobs=True, ignore_eos=True):
        page = visited.page
        visited.log_in(tab="requests")
        page.click("#requests-table tbody button >> nth=0")
        page.wait_for_selector("#life-events li >> nth=1")
        assert "has a seat" in page.inner_text("#life-events")
        page.wait_for_selector(".tokens span[title^='log-probability']")
        assert page.inner_text("#life .tiles").find("ann") > 0
        visited.check_axe()
        visited.shoot("request")
        page.keyboard.press("Escape")
        page.wait_for_selector("#life", state="hidden")
    with visit(chromium, server) as other:  # who has another key sees its numbers, and not its text
        other.log_in("other", tab="requests")
        other.page.click("#requests-table tbody button >> nth=0")
        other.page.wait_for_selector("#life-events li >> nth=0")
        assert "another key" in other.page.inner_text("#life-body")
        assert other.page.query_selector(".tokens") is None


def test_a_call_and_its_answer_in_the_playground(chromium: Any, server: str) -> None:
    with visit(chromium, server, color_scheme="dark", viewport=VIEW) as visited:
        page = visited.page
        visited.log_in(tab="playground")
        page.click("text=An example tool")
        page.select_option("#tool_choice-1", "required")
        page.fill("#temperature-1", "0")
        page.fill("#question", "What is the weather in Paris?")
        page.keyboard.press("Control+Enter")
        visited.wait("() => document.getElementById('ask-status').textContent === 'Done'")
        assert page.inner_text(".tool-call strong") == "get_weather"
        assert "city" in page.inner_text(".tool-call pre")
        assert "celsius" in page.inner_text(".turn.tool")
        assert page.locator(".turn.assistant").count() >= 2  # the call, and what was made of its answer
        visited.check_axe()
        visited.shoot("playground")
        page.click("#clear")
        page.click("#compare")
        page.fill("#tools-1", "")
        page.fill("#temperature-2", "0.5")
        page.fill("#question", "Who are you?")
        page.click("#send")
        visited.wait("() => document.getElementById('ask-status').textContent === 'Done'")
        answers = page.locator(".turn.assistant .content")
        assert answers.count() == 2
        assert all(text.strip() for text in answers.all_inner_texts())
        page.fill("#schema-1", "{")
        page.fill("#question", "Hello")
        page.click("#send")
        visited.wait("() => document.getElementById('ask-status').textContent.startsWith('schema of settings 1')")


@pytest.mark.long
def test_what_is_copied_runs(chromium: Any, server: str) -> None:
    """The text of both buttons: curl is run by a shell, and Python's is a program."""
    with visit(chromium, server) as visited:
        page = visited.page
        visited.log_in(tab="playground")
        body = {"model": "quire-demo", "messages": [{"role": "user", "content": 'It\'s "me" – hé'}], "top_k": 3}
        texts = page.evaluate(
            "async body => { const made = await import('/dashboard/static/playground.js');"
            " const at = 'http://h/v1/chat/completions'; return [made.curl(at, body), made.python(at, body)] }",
            body,
        )
    assert KEY not in "".join(texts)
    import json
    import shlex

    words = shlex.split(texts[0].replace("\\\n", " "))
    assert words[:2] == ["curl", "http://h/v1/chat/completions"]
    assert json.loads(words[-1]) == body
    compile(texts[1], "copied", "exec")
    assert "extra_body" in texts[1]


@pytest.mark.long
def test_a_thousand_requests_are_few_rows(chromium: Any, server: str) -> None:
    """However many there are, the document holds those in sight."""
    with visit(chromium, server) as visited:
        page = visited.page
        visited.log_in(tab="requests")
        rows = page.evaluate(
            """async () => {
                const {RequestList} = await import('/dashboard/static/requests.js');
                const list = new RequestList(() => {});
                const one = (i) => ({id: `r-${i}`, status: 'running', key: 'ann', prompt: 5, cached: 0, output: i,
                                     blocks: 1, preemptions: 0, arrival: 0});
                const requests = Array.from({length: 1000}, (_, i) => one(i));
                list.show({requests, ended: [], now: 1, num_requests: 1000});
                const first = document.querySelectorAll('#requests-table tbody tr').length;
                list.box.scrollTop = 500 * 34;
                list.draw();
                return [first, document.querySelector('#requests-table').getAttribute('aria-rowcount'),
                        Boolean(document.querySelector("[data-id='r-500']"))];
            }"""
        )
        assert rows[0] < 60
        assert rows[1:] == ["1001", True]
