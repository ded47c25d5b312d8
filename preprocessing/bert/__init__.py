"""Rows for BERT: the jobs behind `python -m hetseq.preprocessing.bert_corpus`."""
