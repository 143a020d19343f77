"""A plugin that does everything right, for the tests of `PluginConformance`."""
