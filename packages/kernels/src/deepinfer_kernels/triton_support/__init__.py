"""What the Triton forms share: `launch` calls a kernel, `lang` holds functions used inside several,
`interp` makes the interpreter right for bfloat16 and float8, `aot` compiles without a device.

A form itself is ``ops/<operator>/triton.py``. Triton is imported by nothing outside these.
"""
