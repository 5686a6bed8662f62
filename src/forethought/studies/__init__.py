"""Studies: designed sets of conditions, many seeds each, that end in results.json and a page."""
