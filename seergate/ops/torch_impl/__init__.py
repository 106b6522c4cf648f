"""The torch backend: fast on CPUs, runs on any device. Arguments have been checked by the public ops."""
