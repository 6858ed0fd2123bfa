"""Types of settings and ports: conversion of TOML values, names for messages, and port matching."""
