"""What `zpasses.shard` does to a model: DTensor parameters, reads that gather them, flat
buffers."""
