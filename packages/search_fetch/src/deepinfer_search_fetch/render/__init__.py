"""Pages that draw themselves by script: a system Chromium whose only way out is a guarded proxy."""
