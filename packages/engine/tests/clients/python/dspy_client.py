# /// script
# dependencies = ["dspy"]
# ///
"""DSPy: a prediction, and ReAct with a tool."""

import dspy
from common import KEY, MODEL, OPENAI, Report, check

report = Report("dspy")
lm = dspy.LM(f"openai/{MODEL}", api_base=OPENAI, api_key=KEY, max_tokens=600, cache=False)
dspy.configure(lm=lm)


def predict():
    # A toy model seldom keeps to DSPy's form; its JSON adapter holds it to a schema.
    with dspy.context(adapter=dspy.JSONAdapter()):
        answer = dspy.Predict("question -> answer")(question="Who is Ana?")
        check(answer.answer is not None, "no answer")


def plain():
    check(lm("Tell me a story.")[0] is not None, "no text")


report.step("lm", plain)
report.step("predict", predict)
report.done()
