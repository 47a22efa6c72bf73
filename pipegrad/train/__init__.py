"""A training job from a configuration file: what ``pipegrad train`` and ``pipegrad plan`` do."""
