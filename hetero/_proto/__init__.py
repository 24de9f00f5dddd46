"""Generated from protos/hetero/v1/ by protos/generate; do not edit."""
