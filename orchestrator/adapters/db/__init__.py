"""The store in SQL: SQLite for one machine, PostgreSQL for several servers."""
