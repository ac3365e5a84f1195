"""Frameworks that keep lists of backends, each told of ringreduce by a module of its own."""
