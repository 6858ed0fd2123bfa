"""A plugin for drawloom: noise on weights."""
