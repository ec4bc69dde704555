"""Where pages come from: files, JSON lines, WARC archives, sitemaps, feeds, crawls."""
