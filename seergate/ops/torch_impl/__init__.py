"""The torch backend: fast on CPUs, runs on any device. The public ops have checked the arguments."""
