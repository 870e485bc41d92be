"""`/v1/sessions`: list, read, rename, delete, fork, undo, export, import, and what the memory did."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import IO, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..sessions import SessionInfo
from ..sessions.record import check_name, read_info
from ..sessions.store import typed_errors
from .bodies import answer_json, body_schema, owner_of, read_body
from .errors import ApiError
from .schemas import ForkRequest, SessionChange
from .service import RESPONSE, Service
from .streams import unless_left
from .trace import TurnTrace

MAX_TRACED = 8192  # tokens of a turn
MAX_LISTED = 100_000


def session_routes(service: Service) -> APIRouter:
    """The routes of sessions."""
    router = APIRouter(prefix="/v1/sessions", tags=["sessions"])
    store, warm, claims, in_files = service.store, service.warm, service.claims, service.in_files

    def known(name: str) -> str:
        """A name in a path: one that nobody can have is unknown."""
        try:
            check_name(name)
        except ValueError:
            raise ApiError(404, f"there is no session {name!r:.60}", "session_not_found") from None
        return name

    def summary(info: SessionInfo) -> dict[str, Any]:
        return {
            "id": info.name,
            "object": "session",
            "title": info.title,
            "created": int(info.created),
            "updated": int(info.updated),
            "tokens_read": info.tokens_read,
            "state_bytes": info.state_bytes,
            "turns": info.turns,
            "expires": None if store.ttl is None else int(info.updated + store.ttl),
        }

    async def described(name: str, owner: str) -> dict[str, Any]:
        return summary(await in_files(store.info, name, owner))

    @router.get("")
    async def list_sessions(request: Request) -> Response:
        """All sessions of the owner, the newest first."""
        owner = owner_of(request, service)
        found = await in_files(store.list, owner, lambda damaged: service.log.event("damaged_session"))
        found = [info for info in found if not info.name.startswith(RESPONSE)]
        found.sort(key=lambda info: (-info.updated, info.name))
        return answer_json({"object": "list", "data": [summary(info) for info in found[:MAX_LISTED]]})

    @router.post("/import")
    async def import_session(request: Request, id: str | None = None) -> Response:
        """Add the file of an export, which is the body, after all checks. It opens with the same model only."""
        owner = owner_of(request, service)
        name = None if id is None else service.check_name(id)
        with _nameless_file(store.folder) as file:
            async for part in request.stream():
                await in_files(_write, file, part)
            await in_files(_write, file, b"")
            found = await in_files(_import, service, _path_of(file), name, owner)
        return answer_json(await described(found, owner), 201)

    @router.get("/{name}")
    async def get_session(request: Request, name: str) -> Response:
        """A session with its messages."""
        owner, name = owner_of(request, service), known(name)
        turns = await in_files(store.turns, name, owner)
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        return answer_json(await described(name, owner) | {"messages": messages, "memory": "write"})

    @router.patch("/{name}", openapi_extra=body_schema(SessionChange))
    async def change_session(request: Request, name: str) -> Response:
        """Give a session another title, another name, or both."""
        owner, name = owner_of(request, service), known(name)
        change = await read_body(request, SessionChange)
        new = None if change.id is None or change.id == name else service.check_name(change.id)
        with claims.hold(owner, [name] if new is None else [name, new]):
            await in_files(_change, service, owner, name, change.title, new)
        return answer_json(await described(new or name, owner))

    @router.delete("/{name}")
    async def delete_session(request: Request, name: str) -> Response:
        """Delete a session."""
        owner, name = owner_of(request, service), known(name)
        with claims.hold(owner, [name]):
            await in_files(store.delete, name, owner)
            warm.drop(owner, name)
        return answer_json({"id": name, "object": "session.deleted", "deleted": True})

    @router.post("/{name}/fork", openapi_extra=body_schema(ForkRequest) | {"x-optional-body": True})
    async def fork_session(request: Request, name: str) -> Response:
        """Copy a session; each continues without the other. Without a new name, one with a number is chosen."""
        owner, name = owner_of(request, service), known(name)
        body = await read_body(request, ForkRequest, is_optional=True)
        new = service.check_name(body.id) if body.id is not None else await in_files(_free_name, service, owner, name)
        with claims.hold(owner, [name, new]):
            await in_files(store.fork, name, new, owner)
        return answer_json(await described(new, owner), 201)

    @router.post("/{name}/undo")
    async def undo_turn(request: Request, name: str) -> Response:
        """Take back the last turn, exactly. The states before it are kept while a session is in memory."""
        owner, name = owner_of(request, service), known(name)
        with claims.hold(owner, [name]):
            await in_files(_undo, service, owner, name)
        return answer_json(await described(name, owner))

    @router.get("/{name}/export")
    async def export_session(request: Request, name: str) -> Response:
        """The session as a file: safetensors."""
        owner, name = owner_of(request, service), known(name)
        contents = await in_files(store.exported, name, owner)
        headers = {"content-disposition": f'attachment; filename="{name}.safetensors"', "cache-control": "no-store"}
        return Response(contents, 200, headers, "application/octet-stream")

    @router.get("/{name}/trace")
    async def trace_turn(request: Request, name: str) -> Response:
        """What the memory did with each token of the last turn."""
        owner, name = owner_of(request, service), known(name)
        return answer_json(await _trace(request, service, owner, name))

    return router


def _nameless_file(folder: Path) -> IO[bytes]:
    """A temporary file that a kill of the process removes, where the system allows that."""
    if Path("/proc/self/fd").is_dir():
        return tempfile.TemporaryFile(dir=folder)
    return tempfile.NamedTemporaryFile(dir=folder)


def _write(file: IO[bytes], part: bytes) -> None:
    with typed_errors():
        file.write(part)
        file.flush()


def _path_of(file: IO[bytes]) -> str:
    return file.name if isinstance(file.name, str) else f"/proc/self/fd/{file.fileno()}"


def _import(service: Service, path: str, name: str | None, owner: str) -> str:
    try:
        name = service.check_name(read_info(path).name if name is None else name)
        with service.claims.hold(owner, [name]):
            return service.store.import_(path, service.model, name, owner)
    except ValueError as wrong:
        raise ApiError(400, str(wrong).replace(path, "the file"), "bad_session_file") from None


def _change(service: Service, owner: str, name: str, title: str | None, new: str | None) -> None:
    opened = service.warm.warm(owner, name)
    if new is not None:
        service.store.rename(name, new, owner, title)
    elif title is not None:
        service.store.retitle(name, title, owner)
    else:
        service.store.info(name, owner)  # raises an error if there is none
    service.warm.drop(owner, name)
    version = service.store.version(new or name, owner)
    if opened is not None and version is not None:  # still warm, under its new name and title
        session = opened[0]
        session.record.name = new or name
        session.record.title = session.record.title if title is None else title
        service.warm.put(session, version)


def _free_name(service: Service, owner: str, name: str) -> str:
    base = name.removeprefix(RESPONSE)[:120]  # names with this beginning are not listed
    return next(new for i in itertools.count(2) if not service.store.exists(new := f"{base}-{i}", owner))


def _undo(service: Service, owner: str, name: str) -> None:
    service.store.info(name, owner)  # raises an error if there is none
    opened = service.warm.warm(owner, name)
    if opened is None or not opened[0].can_undo:
        raise ApiError(409, "there is no turn to take back since the server opened the session", "nothing_to_undo")
    session, version = opened
    session.undo()
    try:
        service.warm.save(session, version)
    except BaseException:
        service.warm.drop(owner, name)  # the file is as it was
        raise


async def _trace(request: Request, service: Service, owner: str, name: str) -> dict[str, Any]:
    await service.in_files(service.store.info, name, owner)  # raises an error if there is none
    with service.claims.hold(owner, [name]):
        opened = await service.in_files(service.warm.warm, owner, name)
        last = None if opened is None else opened[0].last_turn
        if opened is None or last is None:
            raise ApiError(409, "there is no turn to inspect since the server opened the session", "nothing_to_inspect")
        (cache, ids), answered = last, opened[0].last_answer
    if len(ids) > MAX_TRACED:
        raise ApiError(
            400, f"the turn has {len(ids):,} tokens, and at most {MAX_TRACED:,} are inspected", "turn_too_long"
        )
    trace = TurnTrace(service.model, len(ids))
    await unless_left(request, service, service.inspect(owner, ids, cache, trace.read))
    first = len(ids) - answered
    decode = service.dialogue.decode
    tokens = [
        {"id": token, "text": decode([token]), "role": "user" if i < first else "assistant"}
        for i, token in enumerate(ids)
    ]
    return {"tokens": tokens, "series": trace.series(), "resembled": await asyncio.to_thread(trace.resembled)}
