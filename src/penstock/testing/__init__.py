"""What penstock's own tests use and yours may: conformance suites, faulty disks, fuzz loops."""
