"""What runs at each call of compiled code: parameters to local shards, cached parameters, deferred
gradients, and windows."""
