"""The runtime of compiled code: conversion of parameters to local shards, cached full parameters,
deferred gradients, and gradient windows.

Begin with `forward.py` (`ForwardDispatch`) and `backward.py` (`BackwardDispatch`), which choose
what runs at each call. The check of `run_checks.py` runs before both.
"""
