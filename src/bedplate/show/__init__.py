"""Output for people: terminal pages, the HTML report and the live page."""
