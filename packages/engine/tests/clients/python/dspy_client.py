# /// script
# dependencies = ["dspy"]
# ///
"""DSPy: a prediction, and ReAct with a tool."""

import dspy
from common import KEY, MODEL, OPENAI, QUESTION, Report, check, weather

report = Report("dspy")
lm = dspy.LM(f"openai/{MODEL}", api_base=OPENAI, api_key=KEY, max_tokens=600, cache=False)
dspy.configure(lm=lm)


def predict():
    # A toy model seldom keeps to DSPy's form; its fall-back to JSON holds it to a schema.
    answer = dspy.Predict("question -> answer", adapter=dspy.JSONAdapter())
    with dspy.context(adapter=dspy.JSONAdapter()):
        check(answer(question="Who is Ana?").answer is not None, "no answer")


def plain():
    check(lm("Tell me a story.")[0] is not None, "no text")


def react():
    with dspy.context(adapter=dspy.JSONAdapter()):
        dspy.ReAct("question -> answer", tools=[weather], max_iters=2)(question=QUESTION)


report.step("lm", plain)
report.step("predict", predict)
report.step("react", react)
report.done()
