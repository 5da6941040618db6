"""What a node answers over HTTP: health, metrics, and the read-only API that says what the commands say with --json."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from penstock.disk import in_disk_thread
from penstock.node.config import effective_config
from penstock.node.exposition import CONTENT_TYPE, exposition
from penstock.node.http import HttpAnswer, Route
from penstock.node.ledger import read_ledger

if TYPE_CHECKING:
    from penstock.node.node import Node

__all__ = ["node_routes", "API"]

API = {
    "/api/health": "whether it is ready, why not, and the state of each part: penstock health --json",
    "/api/parts": "each part with what it says about itself",
    "/api/config": "every value in force, secrets hidden: penstock config --effective --json",
    "/api/ledger": "each seam, counted now: penstock ledger --json",
    "/api/disk": "the disk budget, what is used, and when it will be full: penstock top --json",
}
"""The paths of the API and what each answers; /api itself lists them."""


def node_routes(node: Node) -> dict[str, Route]:
    """Return the routes of a node."""

    async def live() -> HttpAnswer:
        return HttpAnswer(b"alive\n")

    async def ready() -> HttpAnswer:
        reason = await node.readiness()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
        return HttpAnswer(f"{reason or 'ready'}\n".encode(), status=status)

    async def metrics() -> HttpAnswer:
        return HttpAnswer(exposition(), CONTENT_TYPE)

    async def api() -> HttpAnswer:
        return HttpAnswer.json(API)

    async def parts() -> HttpAnswer:
        return HttpAnswer.json(node.describe())

    async def config() -> HttpAnswer:
        return HttpAnswer.json(effective_config(node.config))

    async def ledger() -> HttpAnswer:
        return HttpAnswer.json(await in_disk_thread(read_ledger, node.config.data))

    async def disk() -> HttpAnswer:
        return HttpAnswer.json(node.disk_report())

    async def health() -> HttpAnswer:
        reason = await node.readiness()
        states: dict[str, Any] = {name: str(one.state) for name, one in node.health().items()}
        return HttpAnswer.json({"ready": not reason, "reason": reason, "parts": states})

    return {
        "/livez": live,
        "/readyz": ready,
        "/metrics": metrics,
        "/api": api,
        "/api/health": health,
        "/api/parts": parts,
        "/api/config": config,
        "/api/ledger": ledger,
        "/api/disk": disk,
    }
