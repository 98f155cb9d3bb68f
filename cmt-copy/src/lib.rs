//! A multithreaded staging copier.
