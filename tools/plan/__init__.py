"""Plans a training step for any world size and target on this machine: what it costs under every
memory budget.

`zpasses.tools.plan.step_plans` makes the table, `zpasses.tools.plan.plan_command` is the command.
"""
