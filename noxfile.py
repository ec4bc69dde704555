"""Every check of the repository, and its two main jobs. `nox` alone runs the default sessions.

Each package is tested alone: a fresh environment that holds the package and what it declares, so
that an import it forgot to declare fails here and not at a user's.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = ("recipe", "kvtier", "dspark", "eplb", "kernels", "search_fetch", "engine")
LOCAL_DEPS: dict[str, tuple[str, ...]] = {
    "engine": ("recipe", "kvtier", "dspark", "kernels")
}  # nobody else has any
TESTS = {"engine": ("packages/engine/tests/unit", "packages/engine/tools/train_demo/tests")}
FUZZ = "packages/recipe/tools/conformance_fuzz.py"
TORCH_FREE = ("recipe", "kvtier", "eplb", "search_fetch")

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = [
    "lint", "types", "tests", "integrations",
    "integration", "search", "grammar", "conformance", "docs",
]  # fmt: skip

# One pin for everything that is installed here: an unpinned torch is a CUDA build of several GB.
os.environ.setdefault("PIP_CONSTRAINT", str(ROOT / "constraints.txt"))
os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER_PYTHONS = [v for v in ("3.12", "3.13") if v != HERE and shutil.which(f"python{v}")]


def install(session: nox.Session, package: str, extra: str = "") -> None:
    """Install a package and the siblings it needs from the tree, in one resolution."""
    paths = [f"./packages/{name}" for name in LOCAL_DEPS.get(package, ())]
    session.install(*paths, f"./packages/{package}{extra}")


def check_package(session: nox.Session, package: str) -> None:
    """The examples of its pages with the bare package, then the tests with the test extra."""
    session.env.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    install(session, package)
    pages = sorted((ROOT / "packages" / package).glob("docs/*.md"))
    examples = [str(page) for page in pages if "```python" in page.read_text(encoding="utf-8")]
    session.run("python", "testing/run_readme.py", f"packages/{package}/README.md", *examples)
    install(session, package, "[test]")
    session.run("pytest", *TESTS.get(package, (f"packages/{package}/tests",)), *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package alone (the engine with its siblings): README examples, then its tests."""
    check_package(session, package)


if OTHER_PYTHONS:

    @nox.session(python=OTHER_PYTHONS)
    @nox.parametrize("package", TORCH_FREE, ids=TORCH_FREE)
    def tests_other(session: nox.Session, package: str) -> None:
        """The torch-free packages on the other Python versions of this machine."""
        check_package(session, package)

    nox.options.sessions.append("tests_other")


@nox.session
def integration(session: nox.Session) -> None:
    """The whole server: real processes, real sockets, the official client libraries."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine", "[test]")
    session.run("python", "testing/run_readme.py", "README.md")
    session.run("pytest", "packages/engine/tests/integration", *session.posargs)


@nox.session
def grammar(session: nox.Session) -> None:
    """Answers held to schemas and tools; elsewhere these tests skip, for want of xgrammar."""
    session.env.update(OMP_NUM_THREADS="1")
    siblings = [f"./packages/{name}" for name in LOCAL_DEPS["engine"] if name != "recipe"]
    session.install("./packages/recipe[test,grammar]", *siblings, "./packages/engine[test,grammar]")
    recipe = sorted((ROOT / "packages/recipe/tests").glob("test_grammar*.py"))
    session.run("pytest", *map(str, recipe), *session.posargs)
    engine = ROOT / "packages/engine/tests/integration"
    chosen = [*sorted(engine.glob("test_constrain*.py")), engine / "test_kept_responses.py"]
    session.run("pytest", *map(str, chosen), *session.posargs)


@nox.session
def search(session: nox.Session) -> None:
    """Web search that the server runs; elsewhere these tests skip, for want of search_fetch."""
    session.env.update(OMP_NUM_THREADS="1")
    siblings = [f"./packages/{name}" for name in LOCAL_DEPS["engine"] if name != "recipe"]
    own = ("./packages/recipe[grammar]", "./packages/search_fetch[remote]", *siblings)
    session.install(*own, "./packages/engine[test,grammar,search]")
    tests = (ROOT / "packages/engine/tests").rglob("test_web_search.py")
    session.run("pytest", *sorted(map(str, tests)), *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """The codec against the recorded corpus and, where it installs, the public reference."""
    session.install("./packages/recipe[test,conformance]")
    tests = ROOT / "packages" / "recipe" / "tests"
    chosen = [*sorted(tests.glob("test_corpus_*.py")), *sorted(tests.glob("test_reference*.py"))]
    session.run("pytest", *(str(path.relative_to(ROOT)) for path in chosen), *session.posargs)
    session.run("python", FUZZ, "--requests", "2000", "--streams", "500")


@nox.session(name="conformance-fuzz")
def conformance_fuzz(session: nox.Session) -> None:
    """The codec against the public reference on generated cases: 20,000 requests, 5,000 streams.

    `nox -s conformance-fuzz -- --seed 7 --requests 100000` runs others.
    """
    session.install("./packages/recipe[test,conformance]")
    session.run("python", FUZZ, *session.posargs)


@nox.session
def oracle(session: nox.Session) -> None:
    """The model beside independent ones: NVIDIA NeMo-Automodel's V4.1, transformers' V4."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "engine", "[test]")
    try:
        session.install("transformers>=5.24,<6", "pillow>=10")
        # Its declared requirements are those of training on GPUs, several GB; on a CPU its model
        # and its checkpoint reader import with the two above.
        session.install("--no-deps", "nemo-automodel==0.7.0")
    except CommandFailed:
        session.skip("nemo-automodel 0.7.0 and transformers >= 5.24 cannot be installed here")
    session.run("pytest", "packages/engine/tests/oracle", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Tests of dspark that take minutes: 1,000 prompts with every drafter and mode."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "dspark", "[test]")
    session.run("pytest", "packages/dspark/tests", "-m", "slow", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting, lint, and who may import whom."""
    session.install("ruff>=0.9,<1", "pytest>=8,<10")
    session.run("ruff", "format", "--check", "packages", "noxfile.py", "docs")
    session.run("ruff", "check", "packages", "noxfile.py", "docs")
    session.run("pytest", "-q", "testing")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types over every package's sources."""
    session.install("basedpyright>=1.30,<2", *[f"./packages/{name}[test]" for name in PACKAGES])
    session.run("basedpyright", "--project", "pyproject.toml", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or a page left out of the navigation fails."""
    session.install("mkdocs-material>=9.5,<10")
    session.run(
        "mkdocs",
        "build",
        "--strict",
        "-f",
        "docs/mkdocs.yml",
        "-d",
        str(Path(session.create_tmp()).resolve()),
    )


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
    install(session, package, "[test]")
    for script in sorted((ROOT / "packages" / package / "benches").glob("bench*.py")):
        session.run("python", str(script), *session.posargs)


@nox.session
def train_demo(session: nox.Session) -> None:
    """Train the embedded checkpoint again: about an hour and a half on two cores, resumable."""
    install(session, "engine", "[train]")
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
    install(session, "search_fetch", "[test]")
    tests = "packages/search_fetch/tests/test_render.py"
    session.run("pytest", tests, "-m", "slow or not slow", *session.posargs)


@nox.session
def integrations(session: nox.Session) -> None:
    """What needs torch: kvtier's adapters for vLLM and SGLang on stubs, and its tensor pools."""
    session.env.update(OMP_NUM_THREADS="1")
    session.install("./packages/kvtier[test]", "torch")
    names = ("test_vllm", "test_sglang", "test_pools")
    tests = [f"packages/kvtier/tests/{name}.py" for name in names]
    session.run("pytest", *tests, *session.posargs)


@nox.session
def windows_mooncake(session: nox.Session) -> None:
    """kvtier's windows by Mooncake's transfer engine on loopback; needs libibverbs1."""
    session.install("./packages/kvtier[test,mooncake]")
    session.run("pytest", "packages/kvtier/tests/test_windows_mooncake.py", *session.posargs)


@nox.session
def mount(session: nox.Session) -> None:
    """kvtier on a shared file system: eight machines, one killed every second, for a minute."""
    session.env.update(OMP_NUM_THREADS="1", KVTIER_STRESS="1")
    install(session, "kvtier", "[test]")
    session.run("pytest", "packages/kvtier/tests/mount", "-s", *session.posargs)


@nox.session
def redis(session: nox.Session) -> None:
    """kvtier's directory service: its own shards, and a real redis-server on loopback."""
    install(session, "kvtier", "[test,redis]")
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        session.warn("no redis-server: apt install redis-server; its tests are skipped")
    session.run("pytest", "packages/kvtier/tests/service", *session.posargs)


@nox.session
def s3(session: nox.Session) -> None:
    """kvtier's object-storage tier over HTTP against moto, a mock of S3."""
    install(session, "kvtier", "[test,s3]")
    session.install("moto[server]>=5,<6", "boto3>=1.34,<2")
    session.run("pytest", "packages/kvtier/tests/tiers", *session.posargs)


@nox.session
def mooncake(session: nox.Session) -> None:
    """kvtier's Mooncake tier against a real master on loopback; needs libibverbs1."""
    install(session, "kvtier", "[test,mooncake]")
    tests = sorted((ROOT / "packages/kvtier/tests/tiers").glob("test_mooncake*.py"))
    session.run("pytest", *map(str, tests), *session.posargs)


@nox.session(name="kvtier-faults")
def kvtier_faults(session: nox.Session) -> None:
    """kvtier on failing files: 1.2 million records compared, 100,000 steps of the model test."""
    session.env.update(OMP_NUM_THREADS="1", KVTIER_MODEL_STEPS="100000")
    session.install("./packages/kvtier[test]")
    session.run("python", "-m", "deepinfer_kvtier.faultrun", "--reads", "1000000")
    compressed = ("--reads", "200000", "--compression", "shuffle+zstd-1")
    session.run("python", "-m", "deepinfer_kvtier.faultrun", *compressed)
    session.run("pytest", "packages/kvtier/tests/test_model.py", *session.posargs)


@nox.session
def relevance(session: nox.Session) -> None:
    """Search quality on judged collections; below the stored floors it fails.

    `nox -s relevance -- FOLDER` for collections elsewhere than in ../shared/data/search_ir.
    """
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "search_fetch", "[dense]")
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
    session.install("./packages/search_fetch[train]")
    bench = "packages/search_fetch/benches/gate_extraction.py"
    session.run("python", bench, str(folder), "--cross-validate", "--floors", *session.posargs)


@nox.session(name="search_fetch-slow")
def search_fetch_slow(session: nox.Session) -> None:
    """The heavy tests of search_fetch that repeat a claim of the default suite on more cases."""
    session.env.update(OMP_NUM_THREADS="1")
    install(session, "search_fetch", "[test]")
    session.run("pytest", "packages/search_fetch/tests", "-m", "slow", *session.posargs)
