"""Provision and administer a federation: start-up kits, certificates, gateway, backup, health."""
