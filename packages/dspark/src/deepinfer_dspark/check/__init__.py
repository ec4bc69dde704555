"""Checks of somebody else's speculation: does it keep the target's distribution?"""

from deepinfer_dspark.check.budgets import check_budget
from deepinfer_dspark.check.completions import check_completions
from deepinfer_dspark.check.report import Report
from deepinfer_dspark.check.verifying import check_verify

__all__ = ["Report", "check_budget", "check_completions", "check_verify"]
