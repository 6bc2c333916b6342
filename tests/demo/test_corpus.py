"""The corpus is reproducible, its answers are right by its own checks, and held-out prompts stay unseen."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from demo import corpus, stories
from demo.task import Task


def test_documents_follow_from_the_seed() -> None:
    def sample(seed: int) -> list[str]:
        rng = Random(seed)
        return ["".join(segment.text for segment in corpus.document(rng)) for _ in range(200)]

    assert sample(3) == sample(3)
    assert sample(3) != sample(4)


@pytest.mark.parametrize("skill", corpus.SKILLS)
def test_held_out_tasks_are_fixed_distinct_and_solvable(skill: str) -> None:
    tasks = corpus.heldout(skill, 60)
    assert [t.key for t in tasks] == [t.key for t in corpus.heldout(skill, 60)]
    assert len({t.key for t in tasks}) == 60
    assert all(task.held_out for task in tasks)
    for task in tasks:
        assert corpus.is_correct(task, corpus.target_text(task))
        assert not corpus.is_correct(task, corpus.target_text(task) + " and more")


def test_no_held_out_question_is_ever_trained_on() -> None:
    def last_question(task: Task) -> str:
        return task.messages[-1]["content"]

    single = [skill for skill in corpus.SKILLS if skill not in ("memory", "tools", "stories")]
    unseen = {last_question(task) for skill in single for task in corpus.heldout(skill, 300)}
    rng = Random(11)
    for _ in range(4000):
        task = corpus.conversation(rng)
        assert not task.held_out
        asked = {message["content"] for message in task.messages if message["role"] == "user"}
        assert not asked & unseen


def test_a_story_must_rhyme_and_keep_to_the_plot() -> None:
    plot = stories.Plot("Ada", "owl", "forest")
    story = stories.tell(Random(5), plot)
    assert stories.is_well_formed(story, plot)
    assert not stories.is_well_formed(story.replace(stories.END, ""), plot)
    assert not stories.is_well_formed(story, replace(plot, hero="Ben"))
    assert not stories.is_well_formed(story, replace(plot, place="desert"))
    *start, last, end = story.split("\n\n")
    first, second = last.split("\n")
    assert not stories.is_well_formed("\n\n".join([*start, f"{first}\n{second} again", end]), plot)
    assert not stories.is_well_formed("\n\n".join([*start, f"{first}\n{first}", end]), plot)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [("a cat,", "the hat.", True), ("a cat", "a cat", False), ("a cat", "a dog", False), ("", "", False)],
)
def test_rhymes(first: str, second: str, expected: bool) -> None:
    assert stories.rhymes(first, second) is expected


def test_thinking_has_to_come_first_and_to_end() -> None:
    task = corpus.heldout("thinking", 1)[0]
    assert not corpus.is_correct(task, task.answer)
    assert not corpus.is_correct(task, f"<think>\n{task.answer}")
    assert corpus.is_correct(task, f"<think>\nanything\n</think>\n\n{task.answer}")
