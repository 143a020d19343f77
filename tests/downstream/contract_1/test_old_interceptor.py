"""old-interceptor against the contracts of plugins and interceptors."""

from __future__ import annotations

from ds_testing import InterceptorConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_interceptor.plugin"
    section = "old_interceptor"
    good_config = {"seconds": 0.5}
    bad_configs = ({"seconds": 0},)


class TestInterceptor(InterceptorConformance):
    config = {"old_interceptor": {"seconds": 1e-9}}
