"""`python -m zpasses.tools.docs`: tables in the documentation, generated from the code.

A page marks where a table belongs:

    <!-- generated: options -->
    ... replaced by the table ...
    <!-- end -->

Tables are made of the fields of dataclasses and their docstrings. If an option is added, renamed or
given another default, `--check` names the page that became stale.
"""
