"""Rows for BERT: the jobs behind `python -m preprocessing.bert_corpus`."""
