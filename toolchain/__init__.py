"""C++ built where it runs, by the compiler that is there, and kept."""
