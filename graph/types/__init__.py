"""Types of settings and ports: conversion from TOML values, names for messages, and port matching."""
