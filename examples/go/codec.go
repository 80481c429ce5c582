package main

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers its own codec first
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/runtime/protoimpl"
)

// codec accepts messages of both Go protobuf APIs. The codec in Debian's grpc-go 1.33 supports only the older one. With
// grpc-go 1.36 or later, delete this file.
type codec struct{}

func init() { encoding.RegisterCodec(codec{}) }

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(protoimpl.X.ProtoMessageV2Of(message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, protoimpl.X.ProtoMessageV2Of(message))
}
