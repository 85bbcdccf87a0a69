"""Names the platform of the wheel, which has programs and no Python module."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformTag(BuildHookInterface):
    """CRIU comes with its own C library, so any glibc will do."""

    def initialize(self, version, build_data):
        """Sets the tag."""
        build_data["tag"] = "py3-none-manylinux2014_x86_64"
        build_data["pure_python"] = False
