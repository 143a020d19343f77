"""The fixture `write`, which writes a plugin for one test."""

from odd_plugins import write as write
