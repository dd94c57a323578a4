"""What one lake serves: measured in virtual time where that is affordable, and computed by a model beyond that.

`python -m scripts.scale` prints `docs/guide/scale.md`. `prices` has what Amazon S3 costs and allows, `model` the
requests of a lake as a function of its size, `cluster` mounts of one lake in virtual time, `load` what programs do
there, `year` the slices of a simulated year, and `page` the tables.
"""
