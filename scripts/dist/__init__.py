"""Packages for installing: a source distribution, wheels, and a Debian package (`make dist`, `make deb`)."""
