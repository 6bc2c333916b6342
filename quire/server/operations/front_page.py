"""GET /: what this is, for whoever opens the address."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

import quire
from quire.server.service import Service

router = APIRouter()
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Quire: {models}</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}</style>
<h1>Quire {version}</h1>
<p>An inference server for the model <strong>{models}</strong>, with the APIs of OpenAI and Anthropic. Clients take
<code>{address}/v1</code> (OpenAI) or <code>{address}</code> (Anthropic) as their base URL.</p>
<ul>
{links}
</ul>
</html>
"""


@router.get("/", response_class=HTMLResponse, responses={200: {"content": {"application/json": {}}}})
async def front_page(request: Request) -> Response:
    """A page for people, JSON for programs (`Accept: application/json`)."""
    service: Service = request.app.state.service
    address = str(request.base_url).rstrip("/")
    links = {"models": "/v1/models", "health": "/health", "metrics": "/metrics", "version": "/version"}
    if service.serve.enable_dashboard:
        links = {"dashboard": "/dashboard", **links}
    if service.serve.enable_docs:
        links |= {"docs": "/docs", "openapi": "/openapi.json"}
    accepted = request.headers.get("accept", "*/*")
    if "application/json" in accepted and "text/html" not in accepted:
        return JSONResponse({"name": "quire", "version": quire.__version__, "models": service.names, "links": links})
    items = [f'<li><a href="{escape(address + path)}">{path}</a></li>' for path in links.values()]
    if "docs" not in links:
        items.append(
            "<li>Every route with its fields is at <code>/docs</code> of a server started with "
            "<code>--enable-docs</code>, and in <code>docs/api.md</code> of Quire's source.</li>"
        )
    page = _PAGE.format(
        models=escape(", ".join(service.names)),
        version=quire.__version__,
        address=escape(address),
        links="\n".join(items),
    )
    return HTMLResponse(page, headers={"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"})
