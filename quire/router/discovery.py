"""Where servers are found: by a name's addresses, or by the endpoints of a service of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import urllib.request
from pathlib import Path
from typing import Any

from quire.foundation.errors import ConfigError
from quire.router.backend import check_url

_DNS = re.compile(r"dns://([^/:]+):(\d+)")
_KUBERNETES = re.compile(r"kubernetes://([a-z0-9-]+)/([a-z0-9-]+):(\d+)")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = 5.0  # for the answer of Kubernetes


class Source:
    """What finds servers. `name`: as it was given."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def urls(self) -> set[str]:
        """Those that there are now. Raises OSError."""
        raise NotImplementedError


class DnsSource(Source):
    """All addresses of a name."""

    def __init__(self, name: str, host: str, port: int) -> None:
        super().__init__(name)
        self._host, self._port = host, port

    async def urls(self) -> set[str]:
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=1)
        return {_url(str(address[0]), self._port) for *_, address in found}


class KubernetesSource(Source):
    """The ready endpoints of a service, asked with the pod's own account."""

    def __init__(self, name: str, namespace: str, service: str, port: int, api: str | None = None) -> None:
        """api: http(s)://HOST:PORT; None: as pods are told."""
        super().__init__(name)
        self._port = port
        query = f"labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{query}"
        self._url = (api or _api()) + path

    async def urls(self) -> set[str]:
        slices = await asyncio.to_thread(self._fetch)
        return {_url(address, self._port) for address in addresses_of(slices)}

    def _fetch(self) -> Any:
        request = urllib.request.Request(self._url)
        token, authority = _ACCOUNT / "token", _ACCOUNT / "ca.crt"
        if token.exists():
            request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
        context = None
        if self._url.startswith("https"):
            context = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=context) as answer:
                return json.load(answer)
        except ValueError as error:
            raise OSError(f"Kubernetes does not answer with JSON: {error}") from None


def _url(address: str, port: int) -> str:
    return check_url(f"http://{f'[{address}]' if ':' in address else address}:{port}")


def _api() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    return f"https://{f'[{host}]' if ':' in host else host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"


def addresses_of(slices: Any) -> set[str]:
    """Of the endpoints that are not on their way out; whether they serve the router asks them itself."""
    found: set[str] = set()
    for item in slices.get("items", []):
        for endpoint in item.get("endpoints") or []:
            if not (endpoint.get("conditions") or {}).get("terminating"):
                found.update(endpoint.get("addresses") or [])
    return found


def read_backends(given: list[str]) -> tuple[list[str], list[Source]]:
    """URLs, and what finds more of them. Raises ConfigError."""
    urls: list[str] = []
    sources: list[Source] = []
    for one in given:
        if dns := _DNS.fullmatch(one):
            sources.append(DnsSource(one, dns[1], int(dns[2])))
        elif kubernetes := _KUBERNETES.fullmatch(one):
            sources.append(KubernetesSource(one, kubernetes[1], kubernetes[2], int(kubernetes[3])))
        elif one.startswith(("dns:", "kubernetes:")):
            raise ConfigError(
                "backend must be http://HOST:PORT, dns://NAME:PORT or kubernetes://NAMESPACE/SERVICE:PORT, "
                f"got {one!r}",
                "backend",
            )
        else:
            urls.append(check_url(one))
    return urls, sources
