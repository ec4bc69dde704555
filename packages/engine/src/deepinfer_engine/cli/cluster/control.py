"""Bringing a cluster to what its file says, looking at it, and taking it down."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

from deepinfer_engine.cli.cluster.spec import ROLES, ClusterSpec, Role
from deepinfer_engine.errors import ConfigError, EngineUnavailable

NAMESPACE = "deepinfer"
_PLACE_S = 60.0
_CALL_S = 30.0
_GROUP = re.compile(r"(?P<cluster>[a-z0-9-]+)/(?P<role>[a-z]+)/(?P<start>\d+)\+(?P<count>\d+)")

Say = Callable[[str], None]


@contextmanager
def connected(address: str) -> Generator[Any]:
    """Ray, joined at its address. Raises ConfigError, EngineUnavailable."""
    try:
        ray: Any = import_module("ray")  # an extra, and without types
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "a cluster needs ray, which is not installed: pip install './packages/engine[ray]'"
        ) from exc
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise EngineUnavailable(
            f"no Ray cluster at {address}: {exc}; start one with `ray start --head`"
        ) from exc
    try:
        yield ray
    finally:
        ray.shutdown()


def read_key(spec: ClusterSpec) -> str:
    """The key of the cluster; made where there is none. Raises ConfigError."""
    path = spec.key_file.expanduser()
    try:
        if not path.exists():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32) + "\n")
        key = path.read_text(encoding="ascii").strip()
        long_enough = len(bytes.fromhex(key)) >= 32
    except (OSError, ValueError) as exc:
        raise ConfigError(f"key_file {path}: wanted 64 hexadecimal digits: {exc}") from exc
    if not long_enough:
        raise ConfigError(f"key_file {path}: wanted 64 hexadecimal digits, got {len(key)}")
    return key


def bring_up(ray: Any, spec: ClusterSpec, key: str, say: Say) -> None:
    """Start what is missing, end what is too many; what runs is left alone."""
    from deepinfer_engine.cli.cluster.actors import DirectoryActor

    ray.remote(DirectoryActor).options(
        name=f"{spec.name}/directory",
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    ).remote()
    for role in ROLES:
        wanted, have = spec.role(role).count, _highest(ray, spec.name, role)
        if wanted > have:
            _add(ray, spec, role, have, wanted, key)
            say(f"{role}: {have} -> {wanted}")
        elif wanted < have:
            _remove(ray, spec.name, role, wanted)
            say(f"{role}: {have} -> {wanted}")


def look(ray: Any, cluster: str) -> list[dict[str, Any]]:
    """Every process of a cluster, in order; one whose actor does not answer has its trouble."""
    names = _instances(ray, cluster)
    calls: list[tuple[str, Any]] = []
    for name in names:
        with contextlib.suppress(ValueError):
            calls.append((name, ray.get_actor(name).state.remote()))
    found: list[dict[str, Any]] = []
    for name in names:
        call = next((c for n, c in calls if n == name), None)
        role = name.split("/")[1]
        state: dict[str, Any] = {"role": role, "address": "", "pid": None, "restarts": 0}
        try:
            if call is None:
                state["trouble"] = "its actor is not placed"
            else:
                state = ray.get(call, timeout=3.0)
        except Exception as exc:
            state["trouble"] = f"its actor does not answer: {type(exc).__name__}"
        found.append({"name": name, **state})
    return found


def roll(ray: Any, cluster: str, role: Role | None, say: Say) -> None:
    """Restart the processes one after the other; each finishes what it runs first."""
    for name in _instances(ray, cluster):
        if role is None or name.split("/")[1] == role:
            address = ray.get(ray.get_actor(name).restart.remote())
            say(f"{name} is at {address}")


def take_down(ray: Any, cluster: str, say: Say) -> int:
    """End every process and actor of a cluster; how many there were."""
    names = _instances(ray, cluster)
    for role in reversed(ROLES):
        _remove(ray, cluster, role, 0)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(f"{cluster}/directory"))
    for name in names:
        say(f"{name} has ended")
    return len(names)


def _instances(ray: Any, cluster: str) -> list[str]:
    """Names of all that the placement groups have room for, in the order of roles."""
    found = [
        f"{cluster}/{role}/{number}"
        for role in ROLES
        for number in sorted(_room(_groups(ray, cluster, role)))
    ]
    live = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    return [name for name in found if name in live]


def _highest(ray: Any, cluster: str, role: Role) -> int:
    numbers = [int(n.split("/")[2]) + 1 for n in _instances(ray, cluster) if f"/{role}/" in n]
    return max(numbers, default=0)


def _groups(ray: Any, cluster: str, role: Role) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    table = cast("dict[str, dict[str, Any]]", ray.util.placement_group_table())
    for group in table.values():
        match = _GROUP.fullmatch(group["name"])
        if match is None or group["state"] == "REMOVED":
            continue
        if (match["cluster"], match["role"]) == (cluster, role):
            found.append((int(match["start"]), int(match["count"]), group["name"]))
    return sorted(found)


def _add(ray: Any, spec: ClusterSpec, role: Role, have: int, wanted: int, key: str) -> None:
    from deepinfer_engine.cli.cluster.actors import Router, Worker

    wants = spec.role(role)
    # What was there before may have left room behind.
    room = _room(_groups(ray, spec.name, role))
    missing = [number for number in range(have, wanted) if number not in room]
    if missing:
        start, count = missing[0], len(missing)
        name = f"{spec.name}/{role}/{start}+{count}"
        _place(ray, name, [wants.bundle] * count)
        room |= _room([(start, count, name)])
    strategies: Any = import_module("ray.util.scheduling_strategies")
    settings = spec.of(role).model_dump(mode="json", exclude_unset=True)
    actor = ray.remote(Router if role == "router" else Worker)
    for number in range(have, wanted):
        name = f"{spec.name}/{role}/{number}"
        group, index = room[number]
        actor.options(
            name=name,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=wants.cpus,
            num_gpus=wants.gpus or None,
            resources=wants.resources or None,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=ray.util.get_placement_group(group),
                placement_group_bundle_index=index,
            ),
        ).remote(spec.name, name, role, settings, key)


def _room(groups: Sequence[tuple[int, int, str]]) -> dict[int, tuple[str, int]]:
    """Number of an instance -> group and bundle that are there for it."""
    return {
        number: (name, number - start)
        for start, count, name in groups
        for number in range(start, start + count)
    }


def _place(ray: Any, name: str, bundles: list[dict[str, float]]) -> None:
    """Make a placement group. Raises EngineUnavailable where the cluster has no room."""
    group = ray.util.placement_group(
        bundles,
        strategy="SPREAD",  # a machine that dies takes as few of a role with it as can be
        name=name,
        lifetime="detached",
    )
    try:
        ray.get(group.ready(), timeout=_PLACE_S)
    except ray.exceptions.GetTimeoutError:
        ray.util.remove_placement_group(group)
        raise EngineUnavailable(
            f"the Ray cluster has no room for {len(bundles)} more of {bundles[0]}"
        ) from None


def _remove(ray: Any, cluster: str, role: Role, wanted: int) -> None:
    """End instances from `wanted` on; each finishes what it runs."""
    gone = [
        name
        for name in _instances(ray, cluster)
        if f"/{role}/" in name and int(name.split("/")[2]) >= wanted
    ]
    handles = [ray.get_actor(name) for name in gone]
    for call in [handle.stop.remote() for handle in handles]:
        with contextlib.suppress(Exception):  # one that is dead already has nothing to finish
            ray.get(call, timeout=_CALL_S + 180)
    for handle in handles:
        ray.kill(handle)
    for start, _, name in _groups(ray, cluster, role):
        if start >= wanted:
            ray.util.remove_placement_group(ray.util.get_placement_group(name))
