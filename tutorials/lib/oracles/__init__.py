"""The answers behind `check`, one module a chapter: ch01.py holds EXERCISES of chapter 01.

Reading one spoils the exercise. The worked solutions with their reasons are in ../../solutions.
"""
