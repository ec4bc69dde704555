# /// script
# dependencies = ["lm_eval[api]", "transformers", "torch==2.13.0"]
# ///
"""lm-evaluation-harness: choices scored by the log-probabilities of an echoed prompt, perplexity,
and answers that are generated."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, OPENAI, Report, check

report = Report("lm_eval")
FOLDER = Path(tempfile.mkdtemp())
ROWS = [
    ("Ana lived near the garden with a", [" polite crow.", " 9{]}", "zzzz"]),
    ("Tell me a story about a", [" fox.", " }}}", "</td>"]),
    ('"Where is the blanket?" asked', [" Xena.", " 00:7", "::::"]),
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
target_delimiter: ""
{more}
metric_list: [{{metric: {metric}}}]
"""
TASKS = {
    "choices": ("multiple_choice", "{{q}}", "gold", 'doc_to_choice: "{{c}}"', "acc"),
    "perplexity": ("loglikelihood_rolling", "", "{{q}}{{c[0]}}", "", "byte_perplexity"),
    "answers": (
        "generate_until", "{{q}}", "{{c[0]}}",
        'generation_kwargs: {until: ["."], max_gen_toks: 8}', "exact_match",
    ),
}  # fmt: skip


def prepare():
    data = FOLDER / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"q": q, "c": c, "gold": 0}) for q, c in ROWS))
    for name, (kind, text, target, more, metric) in TASKS.items():
        filled = TASK.format(
            name=name, data=data, kind=kind, text=text, target=target, more=more, metric=metric
        )
        (FOLDER / f"{name}.yaml").write_text(filled)
    demo = Path(__file__).parents[3] / "src" / "deepinfer_engine" / "demo"
    (FOLDER / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, FOLDER / "tokenizer" / name)


def evaluate():
    program = Path(sys.executable).parent / "lm_eval"
    arguments = f"model={MODEL},base_url={OPENAI}/completions,tokenizer={FOLDER / 'tokenizer'}"
    command = [
        str(program), "run", "--model", "local-completions", "--model_args", arguments,
        "--tasks", ",".join(TASKS), "--include_path", str(FOLDER), "--batch_size", "2",
        "--output_path", str(FOLDER / "out"),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=FOLDER, capture_output=True, text=True, timeout=900,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    check(done.returncode == 0, (done.stdout + done.stderr)[-400:])
    [file] = (FOLDER / "out").rglob("results_*.json")
    return json.loads(file.read_text())["results"]


prepare()
results = report.step("evaluate", evaluate) or {}
report.step("choices", lambda: check(results["choices"]["acc,none"] == 1, str(results)))
report.step(
    "perplexity",
    lambda: check(1 < results["perplexity"]["byte_perplexity,none"] < 16, str(results)),
)
report.step("answers", lambda: check("exact_match,none" in results["answers"], str(results)))
report.done()
