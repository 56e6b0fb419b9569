"""The runtime of compiled code: conversion of parameters to local shards, cached full parameters,
deferred gradients, and gradient windows.
"""
