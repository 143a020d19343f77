from ds_step_log.memory import see_memory_usage as see_memory_usage
