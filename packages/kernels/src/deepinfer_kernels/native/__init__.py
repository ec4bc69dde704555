"""What the C++ forms share: `build` compiles them when the package is installed, `library` loads
them, `call` stands around each call. A form itself is ``ops/<operator>/native.py`` and
``native.cpp``; C++ used by several is in ``src``.

This module itself loads nothing: `build` runs where torch is not installed.
"""
