//! Starts victims and the real binary for the tests.
