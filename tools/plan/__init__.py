"""Plans a training step for any world size and target on this machine: what it costs under every
memory budget.

`zpasses.tools.plan.step_plans` makes the table, and `zpasses.tools.plan.block_plans` that of a step
whose blocks are compiled one by one. `zpasses.tools.plan.plan_command` is the command.
"""
