# /// script
# dependencies = ["instructor", "anthropic"]
# ///
"""Instructor: typed answers by tools, JSON and JSON Schema, over both kinds of client."""

import instructor
from anthropic import Anthropic
from common import KEY, MODEL, OPENAI, URL, Report, check
from openai import OpenAI
from pydantic import BaseModel

report = Report("instructor")


class Person(BaseModel):
    name: str
    age: int


def extract(client, **more):
    value = client.create(
        response_model=Person,
        messages=[{"role": "user", "content": "Ana is 7 years old."}],
        **more,
    )
    check(isinstance(value, Person), str(value))


# Mode.JSON only asks in words, which a toy does not follow; these two hold the answer.
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(OpenAI(base_url=OPENAI, api_key=KEY), mode=mode)
    report.step(f"openai {mode.name}", lambda c=made: extract(c, model=MODEL, max_tokens=800))
made = instructor.from_anthropic(Anthropic(base_url=URL, api_key=KEY))
report.step("anthropic tools", lambda: extract(made, model=MODEL, max_tokens=2000))
report.done()
