"""Runs real clients, unmodified and at their defaults, against a real server; writes a table.

Each script of `python/` names what it needs in its own head (PEP 723), each of `node/` in its first
comment; each runs in an environment of its own, by uv and npm. `python run.py openai_sdk codex`
runs some of them. Needs the extra `grammar` in the environment that runs this file. Each report is
kept beside the logs; the table is made of all that are there, so a run may be done in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepinfer_engine

HERE = Path(__file__).parent
CONTEXT = 131_072
SECONDS = 1200


def long_demo(folder: Path) -> Path:
    """The embedded model with the context that coding agents expect."""
    source = Path(deepinfer_engine.__file__).parent / "demo"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    """A three-process server on a free port; its address."""
    command = [sys.executable, "-m", "deepinfer_engine.cli.main", "serve", "--port", "0"]
    command += ["--model", str(model), "--served-model-name", "deepinfer-demo"]
    command += ["--cache-dir", str(model.parent / "cache"), "--num-blocks", "2200"]
    address: list[str] = []
    ready = threading.Event()
    with log.open("w") as out:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                out.write(line)
                out.flush()
                if " serves " in line:
                    address.append(line.split()[-1])
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            ready.wait(120)
            if not address:
                raise SystemExit(f"the server did not start; its words are in {log}")
            yield address[0]
        finally:
            process.terminate()
            process.wait(60)
            reader.join(30)


def command_of(script: Path, work: Path) -> list[str]:
    """What runs a script, once its packages are there."""
    if script.suffix == ".py":
        return ["uv", "run", "-q", "--no-project", "--script", str(script)]
    head = script.read_text().splitlines()[0]
    packages = head.removeprefix("// packages:").split()
    folder = work / script.stem
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    install = ["npm", "install", "--no-fund", "--no-audit", "--loglevel", "error", *packages]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    for name in (script, script.with_name("common.mjs")):
        shutil.copy(name, folder)
    return ["node", str(folder / script.name)]


def run(script: Path, url: str, model: Path, work: Path, logs: Path) -> dict[str, Any]:
    """One client; its report, or a report of why there is none."""
    env = {**os.environ, "DEEPINFER_URL": url, "DEEPINFER_TOKENIZER": str(model)}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("UV_CONSTRAINT", None)  # clients bring what they want
    log = logs / f"{script.name}.log"
    try:
        command = command_of(script, work)
        cwd = work / script.stem if script.suffix == ".mjs" else work
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        log.write_text(done.stdout + "\n" + done.stderr)
        last = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
        return json.loads(last)
    except (StopIteration, ValueError):
        return {"client": script.stem, "version": "-", "steps": {"start": f"see {log.name}"}}
    except (subprocess.SubprocessError, OSError) as error:
        log.write_text(f"{error}\n{getattr(error, 'stderr', '')}")
        return {"client": script.stem, "version": "-", "steps": {"install": str(error)[:200]}}


def report_of(script: Path, logs: Path) -> Path:
    """Where the report of a script is kept."""
    return logs / f"{script.name}.json"


def counters(url: str) -> dict[str, float]:
    """The server's token counts."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    names = ("deepinfer_prompt_tokens_total", "deepinfer_generated_tokens_total")
    return {
        name: float(line.split()[-1])
        for line in text.splitlines()
        for name in names
        if line.startswith(f"{name} ")
    }


HEAD = """# Clients that were tried

Made by `nox -s clients`, or by parts of it (`nox -s clients -- codex`): real clients, unmodified
and at their defaults, against a server of the embedded model with a context of 131,072 tokens.
"""


def table(results: list[dict[str, Any]]) -> str:
    """The page: Markdown, one row a client."""
    rows = [HEAD, "| client | version | what was done | held |", "|---|---|---|---|"]
    for result in results:
        steps = result["steps"]
        good = sum(value == "ok" for value in steps.values())
        failed = "; ".join(f"{name}: {why}" for name, why in steps.items() if why != "ok")
        held = f"{good} of {len(steps)}" + (f" ({failed})" if failed else "")
        names = ", ".join(steps)
        row = f"| {result['client']} | {result['version']} | {names} | {held} |"
        rows.append(row.replace("\n", " "))
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help="names of scripts; all by default")
    parser.add_argument("--table", type=Path, help="file to write the table into")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "client-logs")
    parser.add_argument("--url", help="a server that runs already")
    arguments = parser.parse_args()
    scripts = sorted(p for p in HERE.glob("*/*") if p.suffix in (".py", ".mjs"))
    scripts = [p for p in scripts if p.stem != "common"]
    if shutil.which("npm") is None:
        print("npm is not here: the JavaScript clients are left out")
        scripts = [p for p in scripts if p.suffix == ".py"]
    known = [report_of(script, arguments.logs) for script in scripts]
    if arguments.clients:
        scripts = [p for p in scripts if p.stem in arguments.clients]
    arguments.logs.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = long_demo(work / "model")

        def all_of(url: str) -> None:
            for script in scripts:
                result = run(script, url, model, work, arguments.logs)
                results.append(result)
                report_of(script, arguments.logs).write_text(json.dumps(result))
                bad = {k: v for k, v in result["steps"].items() if v != "ok"}
                state = "ok" if not bad else json.dumps(bad)
                print(f"{result['client']} {result['version']}: {state}", flush=True)
            print(json.dumps(counters(url)))

        if arguments.url:
            all_of(arguments.url)
        else:
            with server(model, arguments.logs / "server.log") as url:
                all_of(url)
    if arguments.table:
        kept = [json.loads(path.read_text()) for path in known if path.exists()]
        arguments.table.write_text(table(kept))
    failed = [r["client"] for r in results if any(v != "ok" for v in r["steps"].values())]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
