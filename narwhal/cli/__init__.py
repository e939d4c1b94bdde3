"""The commands `narwhal` and `narwhal-serve`: read files and environment, print, exit."""
