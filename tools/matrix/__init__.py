"""The quick tests on several versions of torch and Python, each pair in an environment of its own.

    python -m zpasses.tools.matrix --torch 2.13 2.15
    python -m zpasses.tools.matrix --torch 2.13 2.15 --python 3.10 3.13 -- tests/zpasses/compat

Environments lie outside the checkout and are used again. What follows `--` are arguments of pytest.
"""
