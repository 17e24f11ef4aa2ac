"""The engine under schedules: real code, a real server, and a time that passes when the test says so."""
