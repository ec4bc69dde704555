# /// script
# dependencies = ["dspy"]
# ///
"""DSPy: a plain answer, one held to a schema, and a prediction by its default adapter."""

import json
from contextlib import suppress

import dspy
from common import KEY, MODEL, OPENAI, Report, check
from dspy.utils.exceptions import AdapterParseError

report = Report("dspy")
lm = dspy.LM(f"openai/{MODEL}", api_base=OPENAI, api_key=KEY, max_tokens=600, cache=False)
dspy.configure(lm=lm)


def plain():
    check(lm("Tell me a story.")[0] is not None, "no text")


def structured():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    [answer] = lm("Ana is 7 years old.", response_format=form)
    text = answer if isinstance(answer, str) else answer["text"]
    check(set(json.loads(text)) == {"name", "age"}, text)


def predict():
    # A toy seldom keeps to the form of the prompt; what counts is that no request was refused.
    with suppress(AdapterParseError):
        dspy.Predict("question -> answer")(question="Who is Ana?")


report.step("lm", plain)
report.step("response_format", structured)
report.step("predict", predict)
report.done()
